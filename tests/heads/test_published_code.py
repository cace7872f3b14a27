"""Published folders in the hands of a stranger: transformers alone gives what our code gives."""

import copy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eval.decoder import DecodeConfig, Generation, SpeculativeDecoder
from heads import BaseHead, ImmediateHead
from heads.config import HEAD_KINDS
from heads.inputs import FEATURES
from heads.published import write_custom_generate
from tests.support.drive_published_code import drive
from tests.support.families import FAMILIES, tiny
from tests.support.head_inputs import drafted_tokens

VOCABULARY, HIDDEN = 40, 32


def noisy(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """A draft that often agrees with its target."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.06 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return draft


def resized(model: PreTrainedModel, vocabulary: int) -> PreTrainedModel:
    """The same model with fewer tokens, or with padding to more."""
    other = copy.deepcopy(model)
    other.resize_token_embeddings(vocabulary, mean_resizing=False)
    return other


def make_models() -> dict[str, PreTrainedModel]:
    models = {}
    for family in FAMILIES:
        target = tiny(family, 0, vocab=VOCABULARY)
        models[family] = target
        models[f"{family}: draft"] = noisy(target)
    models["llama: fewer ids"] = resized(models["llama: draft"], VOCABULARY - 4)
    models["llama: more ids"] = resized(models["llama: draft"], VOCABULARY + 4)
    models["llama: float32"] = copy.deepcopy(models["llama"]).float()
    models["llama: float32: draft"] = copy.deepcopy(models["llama: draft"]).float()
    models["llama: dynamic"] = tiny(
        "llama",
        0,
        vocab=VOCABULARY,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    models["mamba"] = tiny("mamba", 0, vocab=VOCABULARY)
    for name, window in (("mistral", 4), ("mistral: no window", None)):
        models[name] = tiny("mistral", 0, vocab=VOCABULARY, sliding_window=window)
    models["mistral: draft"] = noisy(models["mistral"])
    return {name: model.eval() for name, model in models.items()}


def make_heads() -> dict[str, BaseHead]:
    """One of every kind, and one that reads everything."""
    torch.manual_seed(5)
    heads = {kind: known.load()(hidden_size=HIDDEN) for kind, known in HEAD_KINDS.items()}
    scales = {"log_q": (-1.0, 2.0), "entropy": (3.0, 5.0)}
    heads["all"] = ImmediateHead(
        hidden_size=HIDDEN, reads=[*FEATURES], width=8, depth=1, scales=scales
    )
    for head in heads.values():
        # A random head hardly varies; these end drafts after one to five tokens.
        torch.nn.init.normal_(head.output.weight, std=1.0)
        torch.nn.init.constant_(head.output.bias, 2.0)
        head.eval()
    return heads


HEADS = make_heads()
DRAWN = drafted_tokens(1, sizes=(VOCABULARY, HIDDEN, HIDDEN))[0]


def case(
    target: str = "llama",
    draft: str | None = None,
    *,
    head: str | None = None,
    seed: int = 0,
    tokens: int = 24,
    threshold: float | None = None,
    longest: int | None = None,
    prompt: tuple[int, ...] = (2, 3, 5),
    **sampling: float,
) -> dict[str, Any]:
    """One call of `generate`; a threshold asks for the head."""
    warps = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | sampling
    arguments: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": warps["temperature"] > 0}
    if arguments["do_sample"]:
        arguments |= warps
    if threshold is not None:
        arguments["threshold"] = threshold
    if longest is not None:
        arguments["num_assistant_tokens"] = longest
    return {
        "target": target,
        "draft": draft or f"{target}: draft",
        "head": head or (None if threshold is None else "specdec++"),
        "seed": seed,
        "prompt": [list(prompt)],
        "arguments": arguments,
        "warps": warps,
    }


SAME = [
    *(case(seed=seed, longest=4) for seed in range(3)),
    *(case(seed=seed, threshold=0.5) for seed in range(3)),
    *(case(seed=seed, threshold=threshold) for seed, threshold in enumerate((0.0, 0.2, 0.8, 1.0))),
    case(threshold=0.9, longest=3),
    *(case(seed=3, tokens=tokens, longest=5) for tokens in (1, 2, 3, 9)),
    *(case(seed=4, longest=5, temperature=temperature) for temperature in (0.3, 1.6)),
    *(case(seed=5, longest=5, top_k=top_k) for top_k in (1, 3, 90)),
    *(case(seed=6, longest=5, top_p=top_p) for top_p in (0.05, 0.5, 0.9)),
    *(case(seed=6, longest=5, min_p=min_p) for min_p in (0.05, 0.4)),
    case(seed=7, threshold=0.6, temperature=0.7, top_k=9, top_p=0.8, min_p=0.1),
    *(case(longest=4, temperature=0.0, prompt=(start, 4)) for start in range(5, 8)),
    case(threshold=0.5, temperature=0.0),
    case(tokens=60, longest=40, prompt=(7,)),  # tests of a draft take more than a block of uniforms
    *(case(draft=f"llama: {kind} ids", longest=4) for kind in ("fewer", "more")),
    case(draft="llama: fewer ids", longest=4, prompt=(VOCABULARY - 1, 2)),
    case("llama: float32", threshold=0.6),
    # The head reads states of width 32.
    *(case(family, threshold=0.6) for family in FAMILIES if family != "opt, projected"),
    case("opt, projected", longest=4),
    *(
        case(head=name, threshold=threshold, seed=seed, tokens=40)
        for name in HEADS
        for seed, threshold in enumerate((0.4, 0.8))
    ),
    case(head="all", threshold=0.7, temperature=0.7, top_k=9, top_p=0.8),
    case(head="immediate", threshold=0.6, temperature=0.0),
    case(head="all", threshold=0.6, longest=3),
    case("llama", "llama: fewer ids", head="immediate", threshold=0.8),
]
# Our decoder has no windows, transformers' greedy decoding has.
WINDOWED = case("mistral", temperature=0.0, longest=4, tokens=20, prompt=(11, 4, 7))


def ours(models: dict[str, PreTrainedModel], case: dict[str, Any]) -> Generation:
    """Our decoder's output for a case."""
    arguments = case["arguments"]
    rule: dict[str, Any] = {"stop": "fixed", "length": arguments.get("num_assistant_tokens")}
    if case["head"]:
        limit = arguments.get("num_assistant_tokens", 20)
        rule = {"stop": "head", "threshold": arguments["threshold"], "limit": limit}
    config = DecodeConfig(verifier="block", **rule, **case["warps"])
    decoder = SpeculativeDecoder.from_config(
        models[case["target"]], models[case["draft"]], config, HEADS.get(case["head"])
    )
    return decoder.generate(
        torch.tensor(case["prompt"][0]),
        max_new_tokens=arguments["max_new_tokens"],
        generator=torch.Generator().manual_seed(case["seed"]),
    )


REFUSED = [
    ({"prompt": [[2, 3], [4, 5]]}, "one prompt without padding, got a batch of 2"),
    ({"arguments": {"num_beams": 2}}, "num_beams and num_return_sequences must be 1"),
    ({"arguments": {"attention_mask": [[0, 1, 1]]}}, "one prompt without padding"),
    ({"arguments": {"repetition_penalty": 1.1}}, "needs RepetitionPenaltyLogitsProcessor"),
    ({"arguments": {"return_dict_in_generate": True}}, "only token ids are returned"),
    ({"arguments": {"threshold": 1.5}}, "a probability in [0, 1], got 1.5"),
    ({"arguments": {"num_assistant_tokens": 0}}, "must be at least 1, got 0"),
    ({"arguments": {"stop_strings": ["x"]}}, "stop_strings: not supported"),
    ({"target": "llama: dynamic", "arguments": {"max_new_tokens": 14}}, "changes after 16 tokens"),
    ({"draft": "mamba"}, "mamba does not keep keys and values of every token"),
    ({"draft": None}, "assistant_model must be the draft model, got None"),
    ({"head": "specdec++", "draft": "opt, projected: draft"}, "hidden states of width 32, got 8"),
    ({"head": "all", "draft": "opt, projected: draft"}, "hidden_before of width 32, got 8"),
]


def python_with(package: str, folder: Path) -> Path:
    """Python of a new environment with a package; torch is that of this one."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package]
    install = subprocess.run(pip, capture_output=True, text=True, check=False)
    if install.returncode:
        pytest.skip(f"no package registry for {package}: {install.stderr.splitlines()[-1]}")
    # Last on its path: everything but torch comes from the environment itself.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "torch-of-the-other.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


class Folders:
    """Everything saved, used once with transformers alone, in a process of its own."""

    def __init__(self, root: Path, python: str | Path = sys.executable) -> None:
        self.models = make_models()
        for name, saved in {**self.models, **HEADS}.items():
            saved.save_pretrained(root / name)
        write_custom_generate(root / "llama: draft")
        refused = [
            {**case(), **change, "arguments": {"max_new_tokens": 4} | change.get("arguments", {})}
            for change, _ in REFUSED
        ]
        orders = {
            "folder": str(root / "llama: draft"),
            "models": {name: str(root / name) for name in self.models},
            "whole": str(root / "llama: draft"),
            "heads": {name: str(root / name) for name in HEADS},
            "drawn": {name: torch.as_tensor(v).tolist() for name, v in vars(DRAWN).items()},
            "cases": [*SAME, WINDOWED, *refused],
        }
        self.answers = drive(root, orders, python)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.smoke
@pytest.mark.slow
def test_auto_model_gives_the_heads_logits(folders: Folders) -> None:
    for name, head in HEADS.items():
        assert folders.answers["heads"][name] == [type(head).__name__, False]
        assert folders.answers["logits"][name] == pytest.approx(head.logit(DRAWN), rel=1e-5)


@pytest.mark.smoke
@pytest.mark.slow
def test_custom_generate_draws_the_tokens_that_our_decoder_draws(folders: Folders) -> None:
    made = [ours(folders.models, each) for each in SAME]
    for each, out, tokens in zip(SAME, made, folders.answers["tokens"], strict=False):
        assert tokens == out.tokens.tolist(), each
    # The cases must reach what they are for.
    rounds = [record for out in made for record in out.rounds]
    assert sum(0 < record.accepted < record.drafted for record in rounds) > 20
    assert sum(record.accepted == record.drafted > 1 for record in rounds) > 20
    by_head = [out for each, out in zip(SAME, made, strict=True) if each["head"]]
    assert len({record.drafted for out in by_head for record in out.rounds}) > 4
    accepted_end = [out for out in made if out.rounds[-1].accepted == out.rounds[-1].emitted]
    assert any(out.finish == "eos" for out in accepted_end)
    assert any(out.finish == "length" for out in made)


@pytest.mark.exhaustive
def test_transformers_4_decodes_with_a_folders_own_code_as_we_do(tmp_path: Path) -> None:
    folders = Folders(tmp_path, python_with("transformers==4.57.6", tmp_path / "environment"))
    assert folders.answers["version"].startswith("4.57")
    test_auto_model_gives_the_heads_logits(folders)
    test_custom_generate_draws_the_tokens_that_our_decoder_draws(folders)


@pytest.mark.slow
def test_attention_windows_are_kept_while_tokens_are_removed(folders: Folders) -> None:
    target, prompt = folders.models["mistral"], torch.tensor(WINDOWED["prompt"])
    plain, whole = (
        model.generate(prompt, do_sample=False, max_new_tokens=20)
        for model in (target, folders.models["mistral: no window"])
    )
    assert not torch.equal(plain, whole)
    assert folders.answers["tokens"][len(SAME)] == plain[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: REFUSED[n][1][:30])
def test_what_is_not_supported_is_refused(folders: Folders, number: int) -> None:
    answer = folders.answers["tokens"][number - len(REFUSED)]
    assert isinstance(answer, str)
    assert REFUSED[number][1] in answer


@pytest.mark.slow
def test_a_draft_loaded_with_its_code_still_generates_and_assists_as_before(
    folders: Folders,
) -> None:
    assert folders.answers["own"] == folders.answers["plain"]
    assert folders.answers["assisted"] == folders.answers["unassisted"]
