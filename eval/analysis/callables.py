"""A certificate for whatever generates: five checks of a Python function, one line each.

The function is `generate(prompts, max_new_tokens, seeds)`, which returns the new token ids of each
prompt, or one round, `step(draft, target, ids)`, which returns the ids (1, T) with new ones after
them. Where `generate` has parameters `target` and `draft` it is given the models, tiny ones that
are made here unless others are named; where it has `temperature`, 1 or 0. It may return the rate of
acceptance of the call, too: (texts, rate).

1. **law**: the joint distribution of the next tokens, by walking all draws (`draws`) or by samples;
2. **rows**: several prompts at once are continued as each alone;
3. **same**: a draft that is the target has all its tokens kept;
4. **greedy**: texts are the target's, of prompts that differ in their first token alone;
5. **ends**: a text is as long as asked for, or ends at its first end token.

Greedy texts of a function without `temperature` come of models whose logits are made large.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eval.analysis.certificate import LEVEL, POWER, judge_greedy, judge_sampled
from eval.analysis.draws import drawing
from eval.analysis.ties import greedy_reference
from eval.measuring.records import Strict
from eval.verifiers.rule import Rng, outcomes
from specdata.cache import NAMES
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.probability import probabilities
from specdata.sampling import SamplingConfig

Tokens = tuple[int, ...]
Both = tuple[Any, Any]
"""A target and its draft."""
PromptIds = Sequence[Sequence[int]]
Found = tuple[bool | None, str]
"""The answer of a check, None if it could not be seen, and the finding in words."""

LAW_ROUNDING = 1e-5
"""Total variation that rounding in float32 explains."""
WALKED, DEPTH = 4, 3
"""Tokens of the vocabulary in which draws are walked, and next tokens at most."""
VOCABULARY, NEW = 16, 24
"""The vocabulary of the pair that is made for all else, and the tokens of its texts."""
SEVERAL = 3
SHARPENING, NEVER = 1e5, -1e4
"""The factor that makes logits so large that drawing from them is greedy; the logit of padding."""
WALKED_PROMPT = [1, 2, 3]
CHECKED_PROMPTS = ([3, 5, 7, 4, 2], [8, 5, 7, 4, 2], [6, 2], [9, 1, 1, 4, 10, 3, 12])
"""Prompts of several lengths; two differ in their first token alone."""


class CheckResult(Strict):
    """The finding of one check; `holds` is None if it could not be seen."""

    check: str
    holds: bool | None
    finding: str

    def __str__(self) -> str:
        word = {True: "holds", False: "FAULT", None: "not seen"}[self.holds]
        return f"{self.check:7}{word:9} {self.finding}"


def made_pair(vocabulary: int, end: int | None = None) -> Both:
    """Tiny Llamas; the draft is the target with other numbers added to its weights.

    Token 0 pads, and is never written. The seed is one whose greedy texts vary.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(38)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.4,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=0,
        )
        target = LlamaForCausalLM(config).eval()
        target.lm_head = torch.nn.Linear(16, vocabulary)
        target.lm_head.weight.normal_(0.0, 0.4)
        target.lm_head.bias.copy_(torch.tensor([NEVER, *[0.0] * (vocabulary - 1)]))
        draft = copy.deepcopy(target)
        for weight in draft.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return target, draft


@contextmanager
def sharp(pair: Both) -> Iterator[None]:
    """Enlarge the models' logits, so that draws from them are greedy."""

    def enlarge(_model: Any, _given: Any, output: Any) -> Any:
        output.logits = output.logits * SHARPENING
        return output

    with ExitStack() as closing:
        for model in dict.fromkeys(pair):
            closing.callback(model.register_forward_hook(enlarge).remove)
        yield


class Subject:
    """A function that is certified, and how it is called."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name, self.takes = function, name, {*signature(function).parameters}
        self.is_step = self.takes >= {"draft", "target", "ids"}
        if not self.is_step and not self.takes >= {"prompts", "max_new_tokens", "seeds"}:
            raise ConfigError(
                f"{name} must take (prompts, max_new_tokens, seeds) or (draft, target, ids), it "
                f"takes ({', '.join(signature(function).parameters)})"
            )
        self.has_models = "target" in self.takes
        self.rates: list[float] = []  # of acceptance, as it says, call by call

    def round(self, pair: Both, ids: list[int]) -> Tokens:
        """The new tokens of one round."""
        batch = torch.tensor([ids], device=pair[0].device)
        returned = self.function(draft=pair[1], target=pair[0], ids=batch)
        found = torch.as_tensor(returned).flatten().tolist()
        if found[: len(ids)] != ids or len(found) == len(ids):
            raise ConfigError(
                f"{self.name} must return the ids that it was given and at least one after them; "
                f"given {ids}, it returned {found}"
            )
        return tuple(found[len(ids) :])

    def texts(
        self, pair: Both, prompts: PromptIds, new: int, seed: int = 0, temperature: float = 1.0
    ) -> list[Tokens]:
        """The new tokens of each prompt; of rounds as many as are asked for."""
        if self.is_step:
            torch.manual_seed(seed)
            texts: list[Tokens] = []
            for prompt in prompts:
                text: Tokens = ()
                while len(text) < new:
                    text += self.round(pair, [*prompt, *text])
                texts.append(text[:new])
            return texts
        more = {"target": pair[0], "draft": pair[1], "temperature": temperature}
        returned = self.function(
            prompts=[list(each) for each in prompts],
            max_new_tokens=new,
            seeds=[seed * len(prompts) + row for row in range(len(prompts))],
            **{name: each for name, each in more.items() if name in self.takes},
        )
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], float):
            returned, rate = returned
            self.rates.append(rate)
        if len(returned) != len(prompts):
            raise ConfigError(
                f"{self.name} must return a text for each of {len(prompts)} prompts, it returned "
                f"{len(returned)}"
            )
        return [tuple(torch.as_tensor(each).flatten().tolist()) for each in returned]

    def greedy(self, pair: Both, prompts: PromptIds, new: int) -> list[Tokens] | None:
        """Greedy texts; None if it cannot be made greedy."""
        if "temperature" in self.takes:
            return self.texts(pair, prompts, new, temperature=0.0)
        if not self.has_models:
            return None
        with sharp(pair):
            return self.texts(pair, prompts, new)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """The models, prompts and sizes of the checks.

    Attributes:
        pair: target and draft that texts are generated from, or None for those made here.
        texts: how many sampled ones, of up to `new` tokens, are judged.
        seconds: that draws may be walked, of a pair that is made here.
    """

    pair: Both | None = None
    prompts: PromptIds = CHECKED_PROMPTS
    texts: int = 256
    new: int = NEW
    seconds: float = 60.0

    @property
    def models(self) -> Both:
        """The pair."""
        return self.pair or made_pair(VOCABULARY)


def certify_callable(
    function: Callable[..., Any],
    name: str,
    settings: CheckSettings,
    report: Callable[[CheckResult], object] = lambda finding: None,
) -> list[CheckResult]:
    """Run the five checks; `report` is called with each finding."""
    subject = Subject(function, name)
    if settings.pair is None and not subject.has_models:
        raise ConfigError(
            f"{name} takes no models: say with --target and --draft which ones it generates from, "
            "or let it have parameters `target` and `draft`"
        )
    findings = []
    for check, run in CHECKS.items():
        try:
            holds, finding = run(subject, settings)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it raises is a finding
            holds, finding = False, f"it raised {type(error).__name__}: {str(error)[:200]}"
        findings.append(CheckResult(check=check, holds=holds, finding=finding))
        report(findings[-1])
    return findings


def _sampled(pair: Both, texts: Sequence[tuple[Sequence[int], Tokens]]) -> Found:
    """Sampled texts against the target's distribution."""
    tensors = [(torch.tensor(prompt), torch.tensor(text)) for prompt, text in texts]
    found = judge_sampled(pair, tensors, SamplingConfig())
    return found.p_value >= LEVEL, (
        f"p {found.p_value:.2g} (bound {LEVEL:g}) of N = {2 * found.samples:,} sampled tokens, "
        f"where a total variation of {found.visible_bias:.2g} has power {POWER:g}"
    )


def _compared(pair: Both, prompts: PromptIds, texts: list[Tokens] | None, new: int) -> Found:
    """Greedy texts against the target's own."""
    if texts is None:
        return None, "no greedy texts: it takes neither `temperature` nor the models"
    left, ids = iter(texts), [torch.tensor(each) for each in prompts]
    found = judge_greedy(pair[0], ids, lambda _: torch.tensor(next(left)), new)
    return not found.bugs, "; ".join([found.greedy, *found.differences[:1] * bool(found.bugs)])


def law_check(subject: Subject, settings: CheckSettings) -> Found:
    """The joint distribution of the next tokens."""
    law, why = walked(subject, settings.seconds) if settings.pair is None else ({}, "named models")
    if law:
        depth = max(map(len, law))
        away = total_variation(law, exact_law(made_pair(WALKED)[0], depth))
        finding = f"total variation {away:.2g} of the next {depth} tokens (bound {LAW_ROUNDING:g}, "
        # One text alone may have been drawn by other means, and be drawn again by chance.
        seeds = range(1, 9 if len(law) == 1 else 2) if away > LAW_ROUNDING else ()
        again = (walked(subject, math.inf, [depth], seed=seed)[0] for seed in seeds)
        if all(total_variation(law, each) <= LAW_ROUNDING for each in again):
            return away <= LAW_ROUNDING, f"{finding}rounding), N: every draw walked"
        why = "it draws by other means than torch's and Python's global functions"
    pair, prompts = settings.models, settings.prompts
    prompts = [prompts[number % len(prompts)] for number in range(settings.texts)]
    drawn = [subject.texts(pair, [prompt], settings.new, n)[0] for n, prompt in enumerate(prompts)]
    holds, finding = _sampled(pair, [*zip(prompts, drawn, strict=True)])
    return holds, f"{finding}; not walked: {why}"


def walked(
    subject: Subject, seconds: float, depths: Sequence[int] = range(1, DEPTH + 1), seed: int = 0
) -> tuple[dict[Tokens, float], str]:
    """The exact law of as many next tokens as time allows, else why there is none."""
    pair, prompt = made_pair(WALKED), WALKED_PROMPT
    rounds: dict[Tokens, list[tuple[float, Tokens]]] = {}
    law, until = dict[Tokens, float](), time.perf_counter() + seconds

    def after(text: Tokens, depth: int) -> Iterator[tuple[float, Tokens]]:
        def run(rng: Rng) -> Tokens:
            with drawing(rng):
                if subject.is_step:
                    return subject.round(pair, [*prompt, *text])
                return subject.texts(pair, [prompt], depth, seed)[0]

        for outcome in outcomes(run):
            yield outcome
            if time.perf_counter() > until:
                raise TimeoutError

    try:
        for depth in depths:
            of_depth: dict[Tokens, float] = defaultdict(float)
            waiting: list[tuple[float, Tokens]] = [(1.0, ())]
            while waiting:
                weight, text = waiting.pop()
                if text not in rounds or not subject.is_step:
                    rounds[text] = [*after(text, depth)]
                for chance, new in rounds[text]:
                    longer = (text + new)[:depth]
                    if len(longer) < depth and subject.is_step:
                        waiting.append((weight * chance, longer))
                    else:
                        of_depth[longer] += weight * chance
            law = dict(of_depth)
    except TimeoutError:
        return law, "too many outcomes"
    except Exception as error:  # noqa: BLE001 - if it is the function's own, samples meet it, too
        return {}, str(error)
    return law, ""


@torch.inference_mode()
def exact_law(model: Any, depth: int) -> dict[Tokens, float]:
    """The probability of each text of so many next tokens, where draws are walked."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(depth):
        longer = {}
        for text, weight in law.items():
            logits = model(input_ids=torch.tensor([[*WALKED_PROMPT, *text]])).logits[0, -1]
            chances: list[float] = probabilities(logits, SamplingConfig()).tolist()
            for token, chance in enumerate(chances):
                if chance > 0:
                    longer[(*text, token)] = weight * chance
        law = longer
    return law


def total_variation(law: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    """Half the sum of the differences of two distributions."""
    return 0.5 * sum(abs(law.get(each, 0.0) - other.get(each, 0.0)) for each in {*law, *other})


def rows_check(subject: Subject, settings: CheckSettings) -> Found:
    """Several prompts at once, sampled and greedy."""
    if subject.is_step:
        return None, "a step is one row"
    pair, new = settings.models, settings.new
    several = [settings.prompts[row % len(settings.prompts)] for row in range(1, 1 + SEVERAL)]
    drawn = [
        each
        for call in range(-(-settings.texts // SEVERAL))
        for each in zip(several, subject.texts(pair, several, new, call), strict=True)
    ]
    follows, sampled = _sampled(pair, drawn)
    same, greedy = _compared(pair, several, subject.greedy(pair, several, new), new)
    return bool(follows) and same is not False, f"{SEVERAL} at once: {sampled}; {greedy}"


@contextmanager
def reading(model: Any) -> Iterator[list[tuple[int, list[int]]]]:
    """Note what a model reads in each forward of one row: its first token's place, and the ids."""
    forwards: list[tuple[int, list[int]]] = []

    def note(_model: Any, args: Any, named: dict[str, Any]) -> None:
        ids: Tensor = args[0] if args else named["input_ids"]
        cache = next((named[name] for name in NAMES if named.get(name) is not None), None)
        forwards.append((0 if cache is None else int(cache.get_seq_length()), ids[0].tolist()))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield forwards
    finally:
        hook.remove()


def same_check(subject: Subject, settings: CheckSettings) -> Found:
    """A draft that is the target."""
    if not subject.has_models:
        return None, "it takes no models"
    target, kept, subject.rates = settings.models[0], [], []
    draft, is_drafted = copy.deepcopy(target), False
    for number, prompt in enumerate(settings.prompts):
        with reading(target) as forwards, reading(draft) as drafting:
            [text] = subject.texts((target, draft), [prompt], settings.new, number)
        is_drafted |= bool(drafting)
        whole = [*prompt, *text]
        for place, ids in forwards:
            tokens = range(max(place, len(prompt)), min(place + len(ids), len(whole)))
            kept += [ids[index - place] == whole[index] for index in tokens]
    if not kept or not is_drafted:
        return None, f"it does not call the {'draft' if kept else 'target'}"
    finding = (
        f"of {len(kept)} tokens of texts that the target read, {kept.count(False)} were not kept"
    )
    if rates := subject.rates:
        finding += f"; it says an acceptance of {min(rates):.3g} to {max(rates):.3g}"
    return all(kept) and all(abs(rate - 1) < 1e-3 for rate in rates), finding


def greedy_check(subject: Subject, settings: CheckSettings) -> Found:
    """Greedy texts, one prompt at a time."""
    pair, texts = settings.models, list[Tokens]()
    for prompt in settings.prompts:
        texts += subject.greedy(pair, [prompt], settings.new) or []
    return _compared(pair, settings.prompts, texts or None, settings.new)


def ends_check(subject: Subject, settings: CheckSettings) -> Found:
    """Budgets, end tokens inside of drafts, and the rate of acceptance of a call."""
    if subject.is_step:
        return None, "a step has neither a budget nor an end"
    pair, prompts, wrong = settings.models, settings.prompts, []
    ends = end_ids(pair[0].generation_config)
    for budget, prompt in itertools.product((1, 2, 3, 5, 8, settings.new), prompts[:2]):
        [text] = subject.texts(pair, [prompt], budget, budget)
        due = next((place for place, token in enumerate(text, 1) if token in ends), budget)
        if len(text) != due:
            wrong.append(f"of {budget} tokens {due} were due, {len(text)} came")
    finding = f"budgets of 1 to {settings.new} tokens"
    if settings.pair is None:
        plain = greedy_reference(pair[0], torch.tensor(prompts[0]), settings.new).tolist()
        for end in dict.fromkeys(plain):
            target = made_pair(VOCABULARY, end)[0]
            alike = (target, copy.deepcopy(target))  # all ends lie inside of drafts
            [text] = subject.greedy(alike, prompts[:1], settings.new) or [()]
            if len(text) != (due := plain.index(end) + 1):
                wrong.append(f"an end token was due after {due}, {len(text)} came")
        finding += f", {len({*plain})} end tokens"
    subject.rates = []
    for _ in range(2):
        subject.texts(pair, prompts[:1], settings.new)
    if len({*subject.rates}) > 1:
        first, second = subject.rates
        wrong.append(f"it says an acceptance of {first:.3g}, then of the same call {second:.3g}")
    return not wrong, "; ".join([finding, *wrong[:3]])


CHECKS: dict[str, Callable[[Subject, CheckSettings], Found]] = {
    "law": law_check,
    "rows": rows_check,
    "same": same_check,
    "greedy": greedy_check,
    "ends": ends_check,
}
