"""Vectors for engines: they are what our verifiers give, and their reader tells a fault.

    python -m tests.eval.test_conformance

writes docs/conformance/vectors.json.
"""

import json
import random
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from eval.drafts import DraftTree, How
from eval.verifiers import VERIFIERS
from eval.verifiers.rule import GeneratorRng, Rng
from specdata.probability import SamplingConfig, probabilities
from tests.support.branching import decoded_with

FOLDER = Path(__file__).parents[2] / "docs" / "conformance"
READER = runpy.run_path(str(FOLDER / "check.py"))
V, DRAFTS = 5, 2
DEPTH, WIDTH = 2, 2
"""Drafted tokens on a path, and candidates for the first where there may be more."""
Prefix = tuple[int, ...]
SAMPLINGS = {
    "full": SamplingConfig(),
    "top-k": SamplingConfig(0.7, 3),
    "top-p": SamplingConfig(1.0, 0, 0.8),
    "greedy": SamplingConfig(0.0),
    "equal logits": SamplingConfig(),
}


def vectors() -> dict[str, Any]:
    """All cases, the same on every machine up to the last digits."""
    cases = []
    for number, (title, sampling) in enumerate(SAMPLINGS.items()):
        generator = torch.Generator().manual_seed(number)
        shapes = [(V,) * (depth + 1) for depth in range(DEPTH + 1)]
        size = 0.0 if title == "equal logits" else 1.5
        of_p, of_q = (
            [
                (size * torch.randn(shape, generator=generator, dtype=torch.float64)).round(
                    decimals=3
                )
                for shape in shapes
            ]
            for _ in range(2)
        )
        p, q = ([probabilities(each, sampling) for each in logits] for logits in (of_p, of_q))
        for name, spec in VERIFIERS.items():
            config = decoded_with(name) if spec.lossless else None
            if config is None or (verifier := config.make_verifier()).residual_persists:
                continue
            for draft in range(DRAFTS):
                tree, prefixes = draw_draft(p, q, config.kind, GeneratorRng(generator))
                rows = torch.stack([p[len(each)][each] for each in prefixes])
                logits = torch.stack([of_p[len(each)][each] for each in prefixes])
                verdict = verifier(tree, rows)
                case = {
                    "name": f"{name}, {title}, {draft + 1}",
                    "verifier": name,
                    "parameters": config.verifier_args,
                    "kind": config.kind,
                    "sampling": asdict(sampling),
                    "tokens": tree.tokens,
                    "parents": tree.parents,
                    "target_logits": logits,
                    "p": rows,
                    "draft_logits": draft_logits(of_q, q, tree.distributions),
                    "q": tree.distributions,
                    "drawn_from": tree.distribution_index,
                    "stop": verdict.stop,
                    "next": verdict.bonus,
                }
                cases.append({key: plain(value) for key, value in case.items()})
    return {"vocabulary": V, "cases": cases}


def draw_draft(
    p: list[torch.Tensor], q: list[torch.Tensor], kind: str, rng: Rng
) -> tuple[DraftTree, list[Prefix]]:
    """Draw a draft through `rng`: the draft, and the outcomes that lead to each node.

    Where paths are drawn from different laws, the second's is halfway between both models'.
    """
    shape, _, how = kind.partition(", ")
    laws = [q, [(p_law + q_law) / 2 for p_law, q_law in zip(p, q, strict=True)]]
    prefixes: list[Prefix] = [()]
    parents: list[int] = []
    drawn_from: list[tuple[int, Prefix]] = []
    level = [(0, 0)]  # nodes to continue, and by which of `laws`
    for depth in range(DEPTH):
        grown = []
        for node, law in level:
            left = [True] * len(p[0])
            for number in range(WIDTH if shape != "chain" and not depth else 1):
                path = number if how == "independent" and not depth else law
                weights = (laws[path][depth][prefixes[node]] * torch.tensor(left)).tolist()
                if not any(weights):
                    break
                ranked = how == "chosen" or (how == "greedy" and number < WIDTH - 1 and not depth)
                token = weights.index(max(weights)) if ranked else rng.categorical(weights)
                left[token] = how in ("iid", "independent")
                prefixes.append((*prefixes[node], token))
                parents.append(node)
                drawn_from.append((path, prefixes[node]))
                grown.append((len(parents), path))
        level = grown
    rows = list(dict.fromkeys(drawn_from))
    tree = DraftTree(
        torch.tensor([prefix[-1] for prefix in prefixes[1:]]),
        torch.tensor(parents),
        torch.stack([laws[path][len(prefix)][prefix] for path, prefix in rows]),
        torch.tensor([rows.index(row) for row in drawn_from]),
        shape,  # type: ignore[arg-type]
        how if how in get_args(How) else "iid",  # type: ignore[arg-type]
    )
    return tree.checked(), prefixes


def draft_logits(logits: Any, laws: Any, rows: torch.Tensor) -> torch.Tensor:
    """The logits that rows of q were made of."""
    flat = [each.view(-1, V) for each in laws]
    found = []
    for row in rows:
        depth, place = next(
            (depth, int(place[0]))
            for depth, each in enumerate(flat)
            if len(place := (each == row).all(-1).nonzero().flatten())
        )
        found.append(logits[depth].view(-1, V)[place])
    return torch.stack(found)


def plain(value: Any) -> Any:
    """A value as JSON has it, numbers to twelve digits."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, list):
        return [plain(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def test_the_committed_vectors_are_what_our_verifiers_give() -> None:
    stored, made = json.loads((FOLDER / "vectors.json").read_text())["cases"], vectors()["cases"]
    assert [each["name"] for each in stored] == [each["name"] for each in made]
    assert (FOLDER / "vectors.json").stat().st_size < 1_000_000
    for old, new in zip(stored, made, strict=True):
        for key, value in new.items():
            if isinstance(value, list):
                torch.testing.assert_close(torch.tensor(old[key]), torch.tensor(value))
            else:
                assert old[key] == value, old["name"]
        assert sum(READER["law"](old).values()) == pytest.approx(1.0)


def token_verification(case: dict[str, Any], rng: random.Random) -> tuple[int, int] | None:
    """Token verification of a chain, written as an engine would."""
    if case["verifier"] != "token":
        return None
    for node, token in enumerate(case["tokens"]):
        p, q = case["p"][node], case["q"][case["drawn_from"][node]]
        if rng.random() * q[token] >= p[token]:
            rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
            return node, rng.choices(range(V), rest)[0]
    return len(case["tokens"]), rng.choices(range(V), case["p"][-1])[0]


def test_the_reader_passes_a_sound_engine_and_names_a_faulty_one() -> None:
    cases = [
        each
        for each in json.loads((FOLDER / "vectors.json").read_text())["cases"]
        if each["verifier"] == "token"
    ]
    fault = READER["fault"]
    assert not [each for each in cases if fault(each, token_verification, random.Random(0))]

    def without_residual(case: dict[str, Any], rng: random.Random) -> tuple[int, int] | None:
        node, token = token_verification(case, rng) or (0, 0)
        rejected = node < len(case["tokens"])
        return node, rng.choices(range(V), case["p"][node])[0] if rejected else token

    said = [fault(each, without_residual, random.Random(0)) for each in cases]
    assert sum(each is not None for each in said) > len(cases) // 3


if __name__ == "__main__":
    text = json.dumps(vectors(), separators=(",", ":"))
    (FOLDER / "vectors.json").write_text(text.replace('{"name"', '\n{"name"') + "\n")
