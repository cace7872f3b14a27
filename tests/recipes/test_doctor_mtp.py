"""What is said of the head that a target brings along: the way that it was trained for, or none.

Each is trained in seconds of its own, on texts whose tokens follow from the last but one.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distill.drafts import round_places
from distill.drafts.mtp import read_head
from recipes.command import run_tool
from recipes.doctor_mtp import K
from specdata.drafts.mtp import FAMILIES, FEEDING, Convention
from specdata.lm_head import find_lm_head
from specdata.models import load_model, load_tokenizer
from specdata.target_heads import find_head
from specdata.target_states import target_taps
from tests.support.initial import stored
from tests.support.target_heads import COPIES, with_head

FAMILY = "glm4_moe"
OURS = FAMILIES[FAMILY].engines["vllm"]
LETTERS = torch.arange(66, 82)  # one token each
FOLLOWER = torch.randperm(16, generator=torch.Generator().manual_seed(0))
LENGTH, PROMPT = 12, 4


def texts(count: int, draws: torch.Generator) -> Tensor:
    """(count, LENGTH) texts that begin with the same two letters, as chats do."""
    drawn = torch.randint(16, (count, LENGTH), generator=draws)
    kept = torch.rand(count, LENGTH, generator=draws) < 0.85
    drawn[:, :2] = 0
    for t in range(PROMPT, LENGTH):
        drawn[:, t] = torch.where(kept[:, t], FOLLOWER[drawn[:, t - 2]], drawn[:, t])
    return LETTERS[drawn]


def train(model: nn.Module, steps: int, rate: float, loss: Callable[[Tensor], Tensor]) -> None:
    """Train anew, with norms so uneven that a state before one says little after it."""
    draws = torch.Generator().manual_seed(1)
    for name, weight in model.requires_grad_(True).named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=draws)
        elif name in ("model.norm.weight", "lm_head.norm.weight"):
            weight.data.normal_(generator=draws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.zero_grad()
        loss(texts(32, draws)).backward()
        optimizer.step()
    model.requires_grad_(False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained target, whose head is random."""
    folder = with_head(tmp_path_factory.mktemp("mtp") / "target", FAMILY)
    model = load_model(str(folder))

    def loss(ids: Tensor) -> Tensor:
        return cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:])

    train(model, 200, 1.5e-2, loss)
    model.save_pretrained(folder / "saved")
    trained = load_file(folder / "saved" / "model.safetensors")
    copies = {f"model.layers.2.{name}": trained[of].clone() for name, of in COPIES.items()}
    save(folder, {**trained, **copies}.items())
    draws = torch.Generator().manual_seed(2)
    prompts = load_tokenizer(str(folder)).batch_decode(texts(256, draws)[:, :PROMPT])
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def save(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    whole = {**load_file(folder / "model.safetensors"), **dict(tensors)}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def trained_head(target: Path, out: Path, convention: Convention) -> Path:
    """A copy of a target whose head is trained to be fed in one way."""
    shutil.copytree(target, out)
    model, head = load_model(str(target)), find_head(str(target))
    draft = read_head(model, head, convention)
    lm_head = find_lm_head(draft)

    def loss(ids: Tensor) -> Tensor:
        places = round_places(lm_head, ids, K, taps=target_taps(draft, [], ids))
        logits = (lm_head.logits(place.states).transpose(1, 2) for place in places)
        each = [cross_entropy(q[..., k:-1], ids[:, k + 1 :]) for k, q in enumerate(logits)]
        return torch.stack(each).sum()

    train(draft, 120, 1.5e-2, loss)
    draft.save_pretrained(out / "draft")
    saved = load_file(out / "draft" / "model.safetensors")
    found = {name.removeprefix("model.embed_tokens."): each for name, each in saved.items()}
    found["norm.weight"] = found[
        "lm_head.norm.weight" if "lm_head.norm.weight" in found else "model.norm.weight"
    ]
    save(out, ((theirs, found[ours]) for theirs, ours in head.names.items()))
    return out


def said_of(folder: Path, capsys: pytest.CaptureFixture[str], count: int = 160) -> tuple[int, str]:
    capsys.readouterr()
    asked = ["--prompts", str(folder / "prompts.jsonl"), "--count", str(count)]
    status = run_tool("doctor", [str(folder), *asked, "--max-new-tokens", str(LENGTH - PROMPT)])
    return status, capsys.readouterr().out


TURNED = {
    "as vLLM": OURS,
    "halves": replace(OURS, state_first=True),
    "target's state": replace(OURS, normed_target=False),
    "recycled state": replace(OURS, normed_own=True),
    "first embedding": replace(OURS, zero_first=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("column", TURNED)
def test_the_way_that_a_head_was_trained_for_is_found_and_what_each_engine_loses(
    column: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = TURNED[column]
    folder = trained_head(target, tmp_path / "target", way)
    status, said = said_of(folder, capsys)
    words = "; ".join(map(" ".join, zip(FEEDING, way.words, strict=True)))
    assert (status, f"ok       trained for: {words}\n" in said) == (0, True), said
    assert "not told apart" not in said
    for engine, fed in FAMILIES[FAMILY].engines.items():
        (line,) = re.findall(rf"^.*{re.escape(engine)} .*: feeds it.*", said, re.M)
        assert ("feeds it so" in line) == (fed == way), line
        assert bool(re.search(r"and loses \d+\.\d % \[", line)) == (fed != way), line
    if column == "as vLLM":
        assert re.search(
            r"not told apart on 4 texts: .*give more prompts", said_of(folder, capsys, 4)[1]
        )


def test_a_head_of_random_numbers_is_not_trained(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = said_of(target, capsys)
    assert (status, "problem  head: not trained" in said, "feeds it" in said) == (1, True, False)


def test_a_folder_without_a_head_or_a_server_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hint in (
        (stored(tmp_path / "llama"), "give its --target"),
        ("http://localhost:8000", "folder that it serves"),
    ):
        assert run_tool("doctor", [str(name)]) == 2
        assert hint in capsys.readouterr().err
