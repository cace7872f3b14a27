"""What decoding and its figures cannot do is refused in words, before any work: (call, words)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.papers.replay import expected_counts
from benchmarks.papers.traces import Traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping.logistic import fit_calibration
from eval.drafting.stopping.recorded import RecordedTokens
from eval.drafts import DraftTree
from eval.measuring.metrics import compute_metrics
from eval.measuring.records import check_identity, record_prompt
from eval.runtime.transformers_models import cached_layers
from eval.verifiers import VERIFIERS
from eval.verifiers.optimum import optimal_acceptance, optimal_acceptance_independent
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.sources import hub_source
from tests.support.decoder import head
from tests.support.families import tiny
from tests.support.synthetic_results import by_hand, one_round
from tests.support.tiny import tiny_llama

P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"verifier": "tokn"}, "unknown verifier 'tokn'"),
    ({"stop": "heads"}, "unknown stop 'heads'; choose from fixed"),
    ({"stop": "head", "treshold": 0.5}, "unknown key: did you mean 'threshold'"),
    ({"length": 0}, r"length: must be greater than or equal to 1 \(got 0\)"),
    ({"no_repeat_ngram_size": 3}, "unknown key: nothing here applies no_repeat_ngram_size"),
    ({"top_p": 2.0}, r"top_p must lie in \(0, 1\], got 2"),
    (
        {"verifier": "rrs", "drafter": "paths", "paths": 2, "path_temperatures": (1.0, -1.0)},
        "temperature must be 0 or larger, got -1",
    ),
    ({"stop": "cost", "calibration": (1.0,)}, "calibration.*missing"),
    ({"stop": "cost", "token_seconds": float("inf")}, "token_seconds: must be a finite number"),
    ({"stop": "cost", "verifier": "greedy_block"}, "must not depend on drafted tokens.*is biased"),
    ({"verifier": "kseq", "drafter": "tree"}, "needs widths"),
    ({"verifier": "importance", "verifier_args": {"solver": "magic"}}, "solver"),
    (
        {"verifier": "kseq", "drafter": "paths", "paths": 2, "path_temperatures": (1.0, 2.0)},
        "paths, independent",
    ),
    ({"verifier": "rrs", "drafter": "paths", "paths": 2, "path_temperatures": (1.0,)}, "each"),
]


@pytest.mark.parametrize(("given", "words"), SETTINGS, ids=str)
def test_impossible_settings_are_refused_before_any_model_is_needed(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        DecodeConfig(**given)


def decoder(config: DecodeConfig | None = None, its_head: Any = None) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_config(
        tiny_llama(0), tiny_llama(1), config or DecodeConfig(), its_head
    )


def batch(*seeds: torch.Generator, size: int = 1) -> object:
    prompts = [torch.tensor([2]), torch.tensor([3])]
    return decoder().generate_batch(prompts, max_new_tokens=4, generators=[*seeds], size=size)


def one(prompt: list[int], budget: int) -> object:
    ids = torch.tensor(prompt, dtype=torch.long)
    return decoder().generate(ids, max_new_tokens=budget, generator=torch.Generator())


def with_alibi() -> object:
    return SpeculativeDecoder.from_config(tiny("falcon", 0, alibi=True), None, DecodeConfig())


def over_a_thousand_tokens() -> object:
    q = torch.full((1000,), 1e-3, dtype=torch.float64)
    draft = DraftTree.siblings(torch.tensor([1, 2]), q)
    return VERIFIERS["importance"].make(solver="lp")(draft, q.expand(3, -1))


def drafted_to_the_end() -> object:
    ones = np.ones((1, 2))
    tokens = RecordedTokens(lengths=np.array([2]), q=ones, q_max=ones)
    return expected_counts(Traces(tokens, ones), np.array([[1, 1]]))


HEAD = DecodeConfig(stop="head")
SHARED, OTHER = torch.Generator(), torch.Generator()
GREEDY: Any = "greedy"
ANOTHER_PROMPT = [record_prompt("z", [one_round(0, 0)], seconds=1.0, finish="eos")]
CALLS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ConfigError, "needs an acceptance", lambda: decoder(HEAD)),
    (ConfigError, "width 32, and this draft", lambda: decoder(HEAD, head(32))),
    (ValueError, "T >= 1", lambda: one([], 4)),
    (ValueError, "generator of its own", lambda: batch(SHARED, SHARED)),
    (ValueError, "size", lambda: batch(SHARED, OTHER, size=0)),
    (
        CacheNotRewindableError,
        "^deepseek_v4 keeps a cache of a kind",
        lambda: cached_layers(transformers.DeepseekV4Config()),
    ),
    (ConfigError, "^falcon derives positions from what is not", with_alibi),
    (ValueError, "use solver='truncated'", over_a_thousand_tokens),
    (ValueError, "'iid' or 'distinct'", lambda: optimal_acceptance(P, Q, 2, GREEDY)),
    (ValueError, "1 or larger", lambda: optimal_acceptance(P, Q, 0)),
    (ValueError, "one shape", lambda: optimal_acceptance(P, Q[:2], 2)),
    (ValueError, "one shape", lambda: optimal_acceptance_independent(P, [])),
    (ValueError, r"must both be \(n,\)", lambda: fit_calibration(np.ones(2), np.ones(3))),
    (ValueError, "accept must hold", lambda: fit_calibration(np.full(1, 1.5), np.full(1, 0.5))),
    (ValueError, "q_max must hold", lambda: fit_calibration(np.ones(1), np.full(1, np.nan))),
    (ValueError, "the target gives the last token", drafted_to_the_end),
    (ValueError, "same prompts", lambda: compute_metrics(by_hand(), ANOTHER_PROMPT)),
    (ValueError, "n_draft", lambda: check_identity(replace(by_hand()[0], n_discarded=1))),
    (ValueError, "top_k", lambda: SamplingConfig(top_k=-1)),
    (ConfigError, "dtype must be one of float32", lambda: load_model("any", dtype="int8")),
    (ConfigError, "must hold no password", lambda: hub_source("https://user:hunter2@host/name")),
]


@pytest.mark.parametrize(("error", "words", "call"), CALLS)
def test_what_cannot_be_done_is_refused_in_words(
    error: type[Exception], words: str, call: Callable[[], object]
) -> None:
    with pytest.raises(error, match=words):
        call()
