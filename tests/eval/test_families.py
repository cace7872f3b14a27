"""Every family of causal language models of the installed transformers, small, against `generate`.

`python -m tests.eval.test_families` writes the table of docs/families.md from what families here
do.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata.errors import CacheNotRewindableError, ConfigError
from specdata.models import load_configs, load_model
from specdata.probability import SamplingConfig
from specdata.rollouts.backend import sample_batch
from tests.support.families import (
    BUDGET,
    NO_CACHE,
    NO_POSITIONS,
    OWN_STATE,
    REFUSED,
    build,
    classes,
    greedy,
    small,
)


def noisy(model: Any, share: float = 0.1) -> Any:
    """A draft whose tokens are accepted now and then."""
    torch.manual_seed(1)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(share * 0.25 * torch.randn_like(weight))
    return draft


PROMPTS = [
    torch.randint(2, 96, (count,), generator=torch.Generator().manual_seed(count))
    for count in (20, 3, 11)
]
CHAIN = DecodeConfig(temperature=0.0, length=4)
TREE = DecodeConfig(temperature=0.0, verifier="rrs_wor", drafter="tree", widths=(2, 2))
TOO_OLD = "refused: recurrent layers before transformers 5.21"
RECURRENT = "a recurrent state is of one text"
PLACED = "a token's place in the cache is its position"
# Why a family is refused, in the words of docs/families.md: the error, and words of it.
REASONS: dict[str, tuple[type[Exception], str]] = {
    NO_CACHE: (CacheNotRewindableError, "takes no cache of transformers"),
    TOO_OLD: (CacheNotRewindableError, "which need transformers 5.21"),
    OWN_STATE: (CacheNotRewindableError, "a state of its own kind"),
    NO_POSITIONS: (ConfigError, "derives positions from what is not"),
    RECURRENT: (ConfigError, "so they cannot read a tree"),
    PLACED: (ConfigError, "for that in the text"),
}


def refusal(error: Exception) -> str:
    """The reason of a refusal; anything that is none is raised again."""
    for reason, (kind, words) in REASONS.items():
        if type(error) is kind and words in str(error):
            return reason
    raise error


def decodes(name: str) -> dict[str, str]:
    """What a family decodes as `generate` does: "" if it does, or why it is refused, by case.

    Raises:
        AssertionError: if a text differs.
    """
    model = build(name)
    plain = [greedy(model, prompt) for prompt in PROMPTS]
    draft = noisy(model)
    found: dict[str, str] = {}
    cases = {"chain": (draft, CHAIN), "itself": (model, CHAIN), "tree": (draft, TREE)}
    for case, (its_draft, config) in cases.items():
        try:
            decoder = SpeculativeDecoder.from_config(model, its_draft, config)
        except (CacheNotRewindableError, ConfigError) as error:
            found[case] = refusal(error)
            continue
        outs = [
            decoder.generate(prompt, max_new_tokens=BUDGET, generator=torch.Generator())
            for prompt in PROMPTS
        ]
        seeds = [torch.Generator() for _ in PROMPTS]
        outs += decoder.generate_batch(PROMPTS, max_new_tokens=BUDGET, generators=seeds, size=2)
        assert [out.tokens.tolist() for out in outs] == 2 * plain, f"{name}, {case}"
        rounds = [record for out in outs for record in out.rounds]
        assert any(record.accepted for record in rounds), f"{name}, {case}: nothing was accepted"
        rejected = any(record.accepted < record.depth for record in rounds)
        assert rejected == (case != "itself"), f"{name}, {case}: rejected {rejected}"
        found[case] = ""
    if "" in found.values():
        assert len({token for tokens in plain for token in tokens}) > 3, "too few tokens differ"
    return found


def kind_of_cache(name: str) -> str:
    """What the layers of a family keep, in the words of docs/families.md."""
    if name in ("bloom", "mpt", "minimax_m3_vl_text"):
        return "by place in the cache"
    config = small(name)
    try:
        layers = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    except KeyError:  # of a kind that the model's own code brings
        return "layers of their own"
    for words, kind in (
        ("Linear", "recurrent"),
        ("Indexed", "sparse indexers"),
        ("Sliding", "windows or chunks"),
    ):
        if any(words in layer for layer in layers):
            return kind
    return "windows or chunks" if hasattr(config, "attention_layers") else "full attention"


# In the quick tier, one of each kind of cache: the others take minutes.
QUICK = ("gemma3_text", "llama4_text", "gemma4_text", "glm_moe_dsa", "lfm2", "qwen3_5_text")
QUICK += ("bloom",)
TIERS = dict.fromkeys(QUICK, pytest.mark.smoke)
TIERS |= dict.fromkeys(("falcon_h1", "mamba"), pytest.mark.slow)
FAMILIES = [pytest.param(name, marks=TIERS.get(name, pytest.mark.exhaustive)) for name in classes()]
# Others fail at their first forward.
NO_ROLLOUTS = ("cpmant", "minimax", "xlstm")
ROLLED = [
    pytest.param(name, marks=() if name == "minimax_m3_vl_text" else pytest.mark.exhaustive)
    for name in classes()
    if REFUSED.get(name) != NO_CACHE and name not in NO_ROLLOUTS
]
NO_TREES = {"recurrent": RECURRENT, "by place in the cache": PLACED}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_as_generate_does_or_is_refused_with_a_reason(name: str) -> None:
    found = decodes(name)
    reason = REFUSED.get(name, "")
    if (
        not reason
        and kind_of_cache(name) == "recurrent"
        and not hasattr(DynamicCache, "get_conv_state")
    ):
        reason = TOO_OLD
    no_tree = NO_TREES.get(kind_of_cache(name), "")
    assert found == {"chain": reason, "itself": reason, "tree": reason or no_tree}


@pytest.mark.parametrize("name", ROLLED)
def test_a_prompt_of_a_family_is_completed_beside_longer_ones_as_alone(name: str) -> None:
    model = build(name)
    uniforms = torch.rand(3, BUDGET, generator=torch.Generator().manual_seed(0)).double()
    together = sample_batch(model, [each.tolist() for each in PROMPTS], uniforms, SamplingConfig())
    for prompt, row, drawn in zip(PROMPTS, uniforms, together, strict=True):
        assert drawn == sample_batch(model, [prompt.tolist()], row[None], SamplingConfig())[0]
        assert len({*drawn}) > 3, "too few tokens differ"


SAID = {"output_router_logits": True, "output_hidden_states": True, "return_dict": False}


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_what_config_json_says_of_outputs_changes_no_forward(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SAID))
    loaded = load_model(str(tmp_path))
    decoder = SpeculativeDecoder.from_config(loaded, loaded, CHAIN)
    out = decoder.generate(PROMPTS[1], max_new_tokens=8, generator=torch.Generator())
    assert out.tokens.tolist() == greedy(model, PROMPTS[1], 8)


VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3Config": ("gemma3_text", VISION),
    "Qwen3_5Config": ("qwen3_5_text", {"depth": 1, "num_heads": 2, "out_hidden_size": 32} | VISION),
    "Mistral3Config": ("mistral", VISION | {"model_type": "pixtral", "head_dim": 8}),
    "Llama4Config": (
        "llama4_text",
        VISION | {"vision_output_dim": 16, "projector_output_dim": 16, "projector_input_dim": 16},
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_read_as_its_language_model_alone(name: str, tmp_path: Path) -> None:
    text, vision = WRAPPERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, name)(text_config=small(text).to_dict(), vision_config=vision)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    whole.generation_config.eos_token_id = 7
    whole.save_pretrained(tmp_path / "wrapper")
    folder = tmp_path / "wrapper"
    for _ in range(2):  # the folder, and what is saved of it
        model = load_model(str(folder))
        ids = PROMPTS[0][None]
        with torch.inference_mode():
            # Llama 4's wrapper fails at its own output in transformers 5.24.
            read = whole.language_model if text == "llama4_text" else whole
            assert torch.equal(model(ids).logits, read(input_ids=ids).logits)
        described, generation = load_configs(str(folder))
        assert type(model) is classes()[text]
        assert described.model_type == model.config.model_type == text
        assert generation.eos_token_id == model.generation_config.eos_token_id == 7
        assert "vision" not in repr(model).lower()
        folder = tmp_path / "saved"
        model.save_pretrained(folder)


def table() -> str:
    """The table of docs/families.md, whose every line the tests here decode."""
    kinds: dict[str, list[str]] = {}
    for name in classes():
        kinds.setdefault(REFUSED.get(name) or kind_of_cache(name), []).append(name)
    rows = ["| layers | families | chains | trees | batches |", "|---|---|---|---|---|"]
    decoded = ("full attention", "windows or chunks", "sparse indexers", *NO_TREES)
    for kind in (*decoded, *REASONS):
        if names := kinds.get(kind):
            listed = "" if kind == "full attention" else f": {', '.join(names)}"
            chains = "no" if kind in REASONS else "yes"
            trees = "no" if kind in NO_TREES else chains
            batches = "one per forward pass" if kind in decoded[2:] else chains
            rows.append(f"| {kind} | {len(names)}{listed} | {chains} | {trees} | {batches} |")
    return "\n".join(rows)


PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BLOCK = re.compile(r"(?<=python -m tests.eval.test_families -->\n).*?(?=\n<!--)", re.DOTALL)


def test_the_page_has_the_table_of_what_the_families_do() -> None:
    pinned = "transformers==" + transformers.__version__
    if pinned not in (PAGE.parent.parent / "constraints.txt").read_text().split():
        pytest.skip("the page has the families of the version in constraints.txt")
    found = BLOCK.search(PAGE.read_text())
    assert found is not None
    assert found[0] == table(), "make it again: python -m tests.eval.test_families"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text()))
