"""A head is used with the draft that it was trained for, and with no other of equal width."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from eval.decoder import DecodeConfig, SpeculativeDecoder
from heads import AcceptanceHead, BaseHead
from heads.probe import OtherSamplingWarning, check_head, probe_of
from specdata.drafts.taps import BOUND
from specdata.errors import ConfigError
from tests.support.drive_head import tiny_draft
from tests.support.families import FAMILIES, tiny

HEAD_RULE = DecodeConfig(stop="head", threshold=0.5, verifier="token", top_k=5)


def head_of(draft: PreTrainedModel, **settings: object) -> AcceptanceHead:
    size = draft.get_output_embeddings().weight.shape[-1]
    probe = {"probe": probe_of(draft)} | settings
    return AcceptanceHead(hidden_size=size, depth=0, draft="org/first", **probe).eval()


def error_of(draft: PreTrainedModel, other: PreTrainedModel) -> float:
    recorded, found = torch.tensor(probe_of(draft)), torch.tensor(probe_of(other))
    return float((found - recorded).norm() / recorded.norm())


def test_a_head_of_another_draft_of_equal_width_is_refused_wherever_it_is_used(
    tmp_path: Path,
) -> None:
    draft, other = tiny_draft().eval(), tiny_draft(1).eval()
    head_of(draft).save_pretrained(tmp_path)
    head = BaseHead.from_pretrained(tmp_path)
    check_head(draft, head)
    message = r"trained for another draft \(org/first\).*give the head that was trained for"
    with pytest.raises(ConfigError, match=message):
        check_head(other, head)
    SpeculativeDecoder.from_config(tiny_draft(2).eval(), draft, HEAD_RULE, head)
    with pytest.raises(ConfigError, match=message):
        SpeculativeDecoder.from_config(tiny_draft(2).eval(), other, HEAD_RULE, head)


@pytest.mark.parametrize("family", FAMILIES)
def test_precision_leaves_a_probe_and_other_weights_do_not(family: str) -> None:
    draft, other = (tiny(family, seed, vocab=40).float().eval() for seed in (0, 1))
    for dtype, bound in ((torch.float64, 1e-4), (torch.float16, 0.1), (torch.bfloat16, 0.1)):
        assert error_of(draft, copy.deepcopy(draft).to(dtype)) < bound < BOUND
    assert error_of(draft, other) > 2 * BOUND


def test_a_padded_vocabulary_is_no_other_draft() -> None:
    torch.manual_seed(0)
    draft = tiny("llama", 0, vocab=1000).float().eval()
    padded = copy.deepcopy(draft)
    padded.resize_token_embeddings(1024, mean_resizing=False)
    assert error_of(draft, padded) < 1e-6


def test_a_head_without_a_probe_is_judged_by_its_width() -> None:
    draft, wide = tiny_draft().eval(), tiny("llama", 0, hidden_size=16)
    head = head_of(draft, probe=None)
    check_head(tiny_draft(1).eval(), head)
    with pytest.raises(ConfigError, match="reads states of width 32, and this draft has 16"):
        check_head(wide, head)


@pytest.mark.parametrize("probe", [[1.0, 2.0], [], [float("nan")] * 64])
def test_a_damaged_probe_is_refused(probe: list[float]) -> None:
    draft = tiny_draft().eval()
    with pytest.raises(ConfigError, match="the head"):
        check_head(draft, head_of(draft, probe=probe))


def test_another_sampler_than_that_of_the_labels_is_warned_of() -> None:
    draft, target = tiny_draft().eval(), tiny_draft(1).eval()
    same = {"temperature": 1.0, "top_k": 5, "top_p": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sampling in (None, same):
            head = head_of(draft, sampling=sampling)
            SpeculativeDecoder.from_config(target, draft, HEAD_RULE, head)
        # The head is there, and this rule does not read it.
        other = head_of(draft, sampling={**same, "top_k": 0})
        fixed = DecodeConfig(stop="fixed", length=3, verifier="token", top_k=5)
        SpeculativeDecoder.from_config(target, draft, fixed, other)
    with pytest.warns(OtherSamplingWarning, match=r"top_k=0.*is used with.*top_k=5"):
        SpeculativeDecoder.from_config(target, draft, HEAD_RULE, other)
