"""Every family decodes as `generate` does, whatever its layers keep of the tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.analysis.round_times import measure_times
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.runtime.engines import Engine
from eval.runtime.feeding import sequence_of
from eval.runtime.graphs import EagerWarning
from eval.runtime.model import CachedModel
from specdata.errors import ConfigError
from specdata.models import positions
from specdata.probability import SamplingConfig
from tests.support.families import RECURRENT, WINDOWED, greedy, nearby, tiny

ROOT = Path(__file__).parents[2]
PROMPTS = [torch.tensor(ids) for ids in ([2, 5, 9], [7], [4, 5, 11, 3, 8])]
CASES = {
    "chain": DecodeConfig(temperature=0.0, length=4),
    "tree": DecodeConfig(temperature=0.0, verifier="rrs_wor", drafter="tree", widths=(3, 2, 1)),
    "paths": DecodeConfig(temperature=0.0, verifier="rrs", drafter="paths", paths=2, length=3),
}


# With "eager" attention one token has a mask, too. `test_families` decodes the others.
FIRST = "llama, grouped queries"
FAMILIES_AND_ATTENTION = [
    (FIRST, "sdpa"),
    *(
        pytest.param(name, attention, marks=pytest.mark.slow)
        for name, attention in (
            (FIRST, "eager"),
            ("opt", "sdpa"),
            ("gpt2", "eager"),
            *((name, "sdpa") for name in WINDOWED),
        )
    ),
]


@pytest.mark.parametrize(("family", "attention"), FAMILIES_AND_ATTENTION)
def test_tree_attention_gives_each_node_the_logits_of_its_own_path(
    family: str, attention: str
) -> None:
    """Appended level by level and at once, against a forward over the path without a cache."""
    model = tiny(family, 2, attention=attention)
    # transformers' eager attention has its softmax in float32, in which vector widths round
    # sums of other lengths differently; GPT-Neo has no other, and Llama 4's norms are in float32.
    wide = attention == "sdpa" and family not in ("gpt_neo", "deepseek_v32", "llama4_text")
    close = {"rtol": 0, "atol": 1e-9 if wide else 5e-6}
    cached = CachedModel(model, 40)
    committed = [3, 8, 5, 21]
    tokens, parents = [4, 9, 30, 7, 11, 2], [0, 0, 1, 1, 2, 4]
    paths = [[1], [2], [1, 3], [1, 4], [2, 5], [1, 4, 6]]
    whole = sequence_of(cached, 0, SamplingConfig())
    with torch.inference_mode():
        whole.append(committed[:2], 1).run()
        at_once = whole.append_tree(tokens, parents, committed[2:]).run()
        levels = sequence_of(cached, 0, SamplingConfig())
        levels.append(committed, 1).run()
        by_level = [
            levels.append_tree(tokens[first:last], parents[first:last]).run()
            for first, last in ((0, 2), (2, 5), (5, 6))
        ]
        for node, path in enumerate([[], *paths]):
            ids = committed + [tokens[step - 1] for step in path]
            alone = model(input_ids=torch.tensor([ids])).logits[0, -1]
            torch.testing.assert_close(at_once[node], alone, **close)
            if node:
                torch.testing.assert_close(torch.cat(by_level)[node - 1], alone, **close)


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_models_read_chains_alone_and_run_eagerly(family: str) -> None:
    target, draft = tiny(family, 2), nearby(family)
    with pytest.raises(ConfigError, match=f"^{family} has recurrent layers.*draft chains"):
        SpeculativeDecoder.from_config(target, draft, CASES["paths"])
    with pytest.warns(EagerWarning, match=f"^{family} runs eagerly"):
        SpeculativeDecoder.from_config(target, draft, CASES["chain"], engine="captured")


def test_rounds_of_a_pair_that_drafts_chains_alone_are_timed() -> None:
    pair, prompts = (tiny("qwen3_next", 2), nearby("qwen3_next")), [torch.tensor([5, 6, 7])]
    assert measure_times(*pair, prompts, SamplingConfig(), engine="eager", seed=0)


def test_attention_that_takes_no_mask_reads_chains_only() -> None:
    """Flash attention needs a GPU; what is read of it is its name."""
    target, draft = tiny("llama", 2), tiny("llama", 3)
    target.config._attn_implementation = "flash_attention_2"
    SpeculativeDecoder.from_config(target, draft, CASES["chain"])
    with pytest.raises(ConfigError, match="flash_attention_2 takes no tree mask"):
        SpeculativeDecoder.from_config(target, draft, CASES["tree"])
    with pytest.raises(ConfigError, match="flash_attention_2 takes no tree mask"):
        SpeculativeDecoder.from_config(draft, target, CASES["tree"])


def test_private_names_of_transformers_are_in_one_file() -> None:
    files = [ROOT / "eval/decoder.py", *(ROOT / "eval/runtime").glob("*.py")]
    files += [ROOT / "eval/measuring/assisted.py"]
    names = ("_is_stateful", "_attn_implementation", "_supports_attention_backend")
    readers = {path.name for path in files for name in names if name in path.read_text()}
    assert readers == {"transformers_models.py"}


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0] * 3 + [3.0],
        "original_max_position_embeddings": 16,
    },
}


def roped(rope: str) -> tuple[Any, Any]:
    changes: dict[str, Any] = {"rope_parameters": ROPES[rope] | {"rope_theta": 1e4}}
    if rope == "dynamic":
        changes["max_position_embeddings"] = 16
    target = tiny("llama", 2, **changes)
    return target, nearby("llama", **changes)


@pytest.mark.filterwarnings("ignore:.*cannot be captured:eval.runtime.graphs.EagerWarning")
@pytest.mark.parametrize("engine", ["eager", "captured"])
@pytest.mark.parametrize("rope", ROPES)
def test_length_dependent_ropes_decode_within_the_length_and_are_refused_beyond(
    rope: str, engine: Engine
) -> None:
    """Beyond it a key depends on the forward that wrote it: drafting would change distributions."""
    target, draft = roped(rope)
    prompt, seed = PROMPTS[0], torch.Generator()
    for name in ("chain", "tree"):
        decoder = SpeculativeDecoder.from_config(target, draft, CASES[name], engine=engine)
        out = decoder.generate(prompt, max_new_tokens=13, generator=seed)
        assert out.tokens.tolist() == greedy(target, prompt, 13)
        with pytest.raises(ConfigError, match="change after 16 tokens"):
            decoder.generate(prompt, max_new_tokens=14, generator=seed)
    plain = SpeculativeDecoder.from_config(target, None, CASES["chain"])
    with pytest.raises(ConfigError, match="change after 16 tokens"):
        plain.generate_batch([prompt], max_new_tokens=40, generators=[seed])
    # Nor do the stages before go beyond: labels and states would be of other frequencies.
    assert positions(target.config) == positions(draft.config) == 16
