"""Heads in SpecDec++'s released format: the same probabilities when read as ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from heads import AcceptanceHead
from heads.released import from_released
from recipes.command import run_tool

HIDDEN = 12


class ReleasedBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class ReleasedHead(nn.Module, PyTorchModelHubMixin):
    """As the official code builds it: one block object, repeated, and two logits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, depth = config["hidden_size"], config.get("num_layers", 0)
        self.model = nn.Sequential(*([ReleasedBlock(size)] * depth), nn.Linear(size, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model(hidden)


def released(folder: Path, depth: int) -> ReleasedHead:
    """A head, saved by the mixin as the official training code saves it."""
    config = {"hidden_size": HIDDEN, "num_layers": depth}
    torch.manual_seed(depth)
    head = ReleasedHead(config)
    head.save_pretrained(folder, config=config)
    return head


def accepted(head: ReleasedHead, hidden: Tensor) -> Tensor:
    """Its acceptance probability: the official decoding loop takes class 1 of the softmax."""
    return head(hidden).softmax(dim=-1)[..., 1].detach()


@pytest.mark.parametrize(
    ("depth", "form"), [(0, "safetensors"), (3, "safetensors"), (3, "bin"), (1, "bfloat16")]
)
def test_a_released_head_keeps_its_acceptance_probabilities(
    depth: int, form: str, tmp_path: Path
) -> None:
    theirs = released(tmp_path / "theirs", depth)
    if form == "bin":
        (tmp_path / "theirs/model.safetensors").unlink()
        torch.save(theirs.state_dict(), tmp_path / "theirs/pytorch_model.bin")
    elif form == "bfloat16":
        theirs.bfloat16().save_pretrained(
            tmp_path / "theirs", config={"hidden_size": HIDDEN, "num_layers": depth}
        )
        theirs = theirs.float()
    elif depth == 3:  # of tied tensors one is stored
        assert len(load_file(tmp_path / "theirs/model.safetensors")) == 4
    ours = from_released(tmp_path / "theirs", draft="org/draft")
    hidden = 3.0 * torch.randn(50, 4, HIDDEN, generator=torch.Generator().manual_seed(1))
    found, expected = torch.sigmoid(ours(hidden)).detach(), accepted(theirs, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert float(expected.std()) > 0.05
    assert (ours.rejection_weight, ours.draft, ours.training) == (6.0, "org/draft", False)
    ours.save_pretrained(tmp_path / "ours")
    again = AcceptanceHead.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(hidden), ours(hidden))


def test_the_command_writes_a_head_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    released(tmp_path / "theirs", 3)
    out = tmp_path / "ours"
    command = [str(tmp_path / "theirs"), "--out", str(out)]
    assert not run_tool("import", [*command, "--draft", "org/draft", "--rejection-weight", "12"])
    head = AcceptanceHead.from_pretrained(out)
    assert (head.draft, head.rejection_weight) == ("org/draft", 12.0)
    assert run_tool("import", command) == 2
    assert "give another --out" in capsys.readouterr().err
    assert AcceptanceHead.from_pretrained(out).rejection_weight == 12.0  # nothing is lost
    assert run_tool("import", [str(out), "--out", str(tmp_path / "again")]) == 2
    assert "is a head as this project has it" in capsys.readouterr().err


def test_what_is_no_released_head_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    two_blocks = json.dumps({"hidden_size": HIDDEN, "num_layers": 2}).encode()
    released(tmp_path / "one", 1)
    weights = (tmp_path / "one/model.safetensors").read_bytes()
    for config, model, message in (
        (None, None, r"no config\.json"),
        (b'{"hidden_size": "12"}', None, "hidden_size >= 1 and num_layers >= 0"),
        (two_blocks, None, r"neither model\.safetensors nor pytorch_model\.bin"),
        (two_blocks, weights, "does not hold the 2 blocks of width 12"),
        (two_blocks, b"cut off", r"model\.safetensors cannot be read"),
    ):
        for name, data in (("config.json", config), ("model.safetensors", model)):
            if data is not None:
                (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            from_released(tmp_path)


class Harmful:
    """An example of what a pickle can do: run anything."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (Path("ran"),))


def test_a_pickle_that_is_more_than_tensors_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    released(tmp_path, 1)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.0.linear.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="nothing but tensors is loaded"):
        from_released(tmp_path)
    assert not (tmp_path / "ran").exists()
