"""Drafts on the states of targets whose own layers they cannot begin with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from distill.drafts import round_places
from distill.drafts.states import llama_draft
from distill.toy import save_tokenizer, train_tokenizer
from distill.watch import HeldOut
from eval.decoder import DecodeConfig, SpeculativeDecoder
from specdata.drafts.states_network import states_input, unit
from specdata.drafts.taps import decoder_layers, read_taps
from specdata.errors import ConfigError
from specdata.lm_head import capturing_hidden, find_lm_head
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from tests.support.families import greedy, tiny
from tests.support.initial import make, stored

KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {},
    "gpt_oss": {},
    "cohere2": {"logit_scale": 0.3},
    "qwen3_next": {},
    "falcon_h1": {"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "gpt2": {},
    "phi": {},  # LayerNorm, and a bias of the logits
    "mamba": {},
}


# One whose norm is scaled anew, one with two kinds of layers, one with a bias and LayerNorm.
BRIEF = ("gemma2", "falcon_h1", "phi")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in BRIEF else pytest.mark.exhaustive) for kind in KINDS],
)
def test_a_draft_begins_with_the_targets_norm_and_rows_and_a_silent_layer_of_llamas_kind(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(["a short text about nothing at all, 0123456789"] * 4, 290)
    target = tiny(kind, 0, vocab=len(tokenizer), dtype=torch.float32, **KINDS[kind])
    target.save_pretrained(tmp_path / "target")
    save_tokenizer(tokenizer, tmp_path / "target")
    ids = torch.arange(2, 34)[:, None]
    texts = target.generate(ids, do_sample=True, top_k=0, min_new_tokens=24, max_new_tokens=24)
    rows = {"prompt_ids": texts[:, :3].tolist(), "completion_ids": texts[:, 3:].tolist()}
    rollouts = Dataset.from_dict(rows)

    def made(name: str, **init: Any) -> Any:
        make(tmp_path / "target", tmp_path / name, rollouts, **init)
        return load_model(str(tmp_path / name), target=str(tmp_path / "target"))

    draft = made("draft", kind="states", layers=1)
    reads, text = states_input(draft), texts[:2]
    assert reads is not None
    assert draft.config.model_type == "llama"
    with torch.inference_mode():
        x, logits = reads(text), draft(input_ids=text).logits
        assert torch.equal(draft.model(inputs_embeds=x)[0], draft.model.norm(x))  # silent

        normed: list[Tensor] = []
        with capturing_hidden(target, normed.append):
            expected = target(input_ids=text, use_cache=False).logits
        slope = KINDS[kind].get("logit_scale", KINDS[kind].get("lm_head_multiplier", 1.0))
        rows, weights = draft.lm_head.weight, target.state_dict().items()
        size = rows.norm() / (slope * target.get_output_embeddings().weight.norm())
        bias = [each for name, each in weights if name.endswith(("ln_f.bias", "layernorm.bias"))]
        x = (normed[0] - (bias[-1] if bias else 0.0)) / size
        logits_of_target = draft(inputs_embeds=x).logits
        _, made_of = llama_draft(target, 1, 128, 0)
        last = read_taps(target, [len(decoder_layers(target)[1])], text)
        torch.testing.assert_close(made_of(unit(last, 1)), x, rtol=1e-3, atol=1e-3)
    if (cap := KINDS[kind].get("final_logit_softcapping")) is not None:
        expected = cap * (expected / cap).atanh()
    accuracy = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(logits_of_target, expected, rtol=1e-4, atol=accuracy)

    held_out, fresh = HeldOut(target, rollouts, SamplingConfig()), made("fresh", kind="fresh")
    found = [held_out.measure(each).overall.acceptance for each in (fresh, draft)]
    assert found[0] < found[1]

    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig(temperature=0.0, length=3))
    for prompt in texts[2:5, :9]:  # longer than windows are
        out = decoder.generate(prompt, max_new_tokens=16, generator=torch.Generator())
        assert out.tokens.tolist() == greedy(target, prompt, 16)

    taps = read_taps(target, draft.config.target_states["taps"], text)
    optimizer = torch.optim.SGD(decoder_layers(draft)[1].parameters(), lr=1.0)
    places = round_places(find_lm_head(draft), text, 2, taps=taps)
    sum(place.states.square().mean() for place in places).backward()
    optimizer.step()
    with torch.inference_mode():
        assert not torch.equal(draft(input_ids=text).logits, logits)


def test_a_target_that_makes_its_logits_in_another_way_is_refused(tmp_path: Path) -> None:
    target = stored(tmp_path / "target", "opt, projected")  # its output rows are narrower
    with pytest.raises(ConfigError, match=r"RMSNorm or LayerNorm .*OPTForCausalLM does not"):
        make(target, tmp_path / "draft", kind="states", layers=1)
