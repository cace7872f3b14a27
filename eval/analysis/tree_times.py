"""What rounds of chains and trees take: a few are decoded and timed, the rest follows.

Times are those of the decoder itself, drawing and verification included, on the machine and with
the engine of the evaluation. A round of a chain takes its target forward and so much a token. A
round of a tree takes so much for each of its levels (a forward of the draft), for each node that
the draft runs, and for each node that is drawn, scored by the target and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from transformers import PreTrainedModel

from eval.analysis.static_trees import k_configuration, nodes_of
from eval.analysis.tree_results import RoundTimes, tree_parts
from eval.decode_config import DecodeConfig
from eval.decoder import Generation, SpeculativeDecoder
from eval.runtime.engines import Engine
from specdata.sampling import SamplingConfig
from specdata.seeds import generator_for

CHAINS = (1, 4, 10)
TREES = ((2,), (8,), (32,), (2, 2), (4, 1, 1, 1, 1), (4, 4, 2), (2, 2, 2, 2, 2), (2, *[1] * 7))
"""Shapes that are timed: few and many levels, with few and many nodes that the draft runs."""
TOKENS = 32
"""Tokens of each prompt that a timed shape decodes."""
WARM_UP = 12
TREE_VERIFIER = "rrs_wor"


def chain_config(length: int, verifier: str, sampling: SamplingConfig) -> DecodeConfig:
    """How a chain is decoded."""
    return DecodeConfig(verifier, length=length, **_sampled(sampling))


def tree_config(widths: Sequence[int], verifier: str, sampling: SamplingConfig) -> DecodeConfig:
    """How a k-configuration with distinct siblings is decoded."""
    return DecodeConfig(
        verifier,
        drafter="tree",
        widths=tuple(widths),
        siblings="distinct",
        **_sampled(sampling),
    )


def _sampled(sampling: SamplingConfig) -> dict[str, float]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def decode_in_turn(
    configs: Mapping[str, DecodeConfig],
    prompts: Mapping[str, Sequence[int]],
    *,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    engine: Engine,
    tokens: int,
    seed: int,
    report: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, str, Generation]]:
    """Decode each prompt with each configuration, another one first each time.

    Args:
        configs: by name.
        prompts: token ids by the prompt's own name.
        target: the target.
        draft: the draft.
        engine: how forwards run.
        tokens: most new tokens.
        seed: of the draws, which depend on the prompt and not on the configuration.
        report: called after each generation.

    Yields:
        The names of configuration and prompt, and the generation.
    """
    decoders = {
        name: SpeculativeDecoder.from_config(target, draft, config, engine=engine)
        for name, config in configs.items()
    }
    first = torch.tensor(next(iter(prompts.values())))
    for decoder in decoders.values():
        decoder.warm_up()
        generator = generator_for(seed, "tree times", "warm-up")
        decoder.generate(first, max_new_tokens=min(WARM_UP, tokens), generator=generator)
    names = list(decoders)
    for turn, (prompt, ids) in enumerate(prompts.items()):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            generator = generator_for(seed, "tree times", prompt)
            made = decoders[name].generate(
                torch.tensor(ids), max_new_tokens=tokens, generator=generator
            )
            report()
            yield name, prompt, made


def measure_rounds(
    prompts: Mapping[str, Sequence[int]],
    *,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sampling: SamplingConfig,
    engine: Engine,
    seed: int,
    report: Callable[[], object] = lambda: None,
) -> RoundTimes:
    """Time rounds of `CHAINS` and `TREES`; arguments as of `decode_in_turn`.

    Raises:
        ConfigError: if the models cannot score trees.
    """
    shapes: dict[str, tuple[int, DecodeConfig]] = {
        str(length): (length, chain_config(length, "token", sampling)) for length in CHAINS
    }
    for widths in TREES:
        nodes = nodes_of(k_configuration(widths))
        shapes[str(widths)] = nodes, tree_config(widths, TREE_VERIFIER, sampling)
    timed: dict[str, list[float]] = {name: [] for name in shapes}
    cut: dict[str, list[float]] = {name: [] for name in shapes}
    made = decode_in_turn(
        {name: config for name, (_, config) in shapes.items()},
        prompts,
        target=target,
        draft=draft,
        engine=engine,
        tokens=TOKENS,
        seed=seed,
        report=report,
    )
    for name, _, generation in made:
        for done in generation.rounds[1:]:  # the first has the prompt's forward in it
            seconds = done.draft_seconds + done.target_seconds + done.overhead_seconds
            # A draft that ended early, at an end token or where the text ends, took less.
            (timed if done.drafted == shapes[name][0] else cut)[name].append(seconds)
    medians = {name: float(np.median(timed[name] or cut[name] or [np.nan])) for name in shapes}
    return fit_rounds(
        {length: medians[str(length)] for length in CHAINS},
        {widths: medians[str(widths)] for widths in TREES},
    )


def fit_rounds(chains: Mapping[int, float], trees: Mapping[tuple[int, ...], float]) -> RoundTimes:
    """Least squares of relative errors, no time below 0.

    Args:
        chains: length -> seconds of a round; NaN where none was timed.
        trees: widths -> seconds of a round.

    Raises:
        ValueError: if fewer shapes were timed than there are times to fit.
    """
    errors: list[float] = []

    def fitted(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
        a, b = np.array(parts, dtype=np.float64), np.array(seconds)
        known = np.isfinite(b)
        if known.sum() < a.shape[1]:
            raise ValueError(
                f"{known.sum()} shapes were timed, and {a.shape[1]} times are fitted: the prompts "
                "leave no room for rounds, or every text ends at once"
            )
        a, b = a[known] / b[known, None], np.ones(int(known.sum()))
        found, _ = nnls(a, b)
        errors.extend(np.abs(a @ found - b).tolist())
        return [float(each) for each in found]

    chain = fitted([(1.0, float(length)) for length in chains], list(chains.values()))
    tree = fitted([tree_parts(k_configuration(widths)) for widths in trees], list(trees.values()))
    names = ("chain_round", "chain_token", "tree_round", "level", "run", "node")
    times = dict(zip(names, [*chain, *tree], strict=True))
    return RoundTimes(**times, largest_error=max(errors))
