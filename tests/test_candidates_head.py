"""The head for trees: what it learns, how it is asked, and what a tree drafts by it."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from eval.analysis.rankings import compare_rankings, rounds_of
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from eval.drafting.stopping.tree_cost import TreeCost
from eval.measuring.methods import MethodConfig
from eval.rounds import Round
from eval.runtime.model import CachedModel
from eval.runtime.sequence import drive
from heads import AcceptanceHead, BaseHead
from heads.candidates import CandidatesHead, Ranker
from heads.config import HeadConfig
from heads.probe import probe_of
from heads.train import train_head
from specdata.errors import ConfigError
from specdata.probability import SamplingConfig
from tests.drive_head import synthetic_rows, tiny_draft
from tests.tiny import END, tiny_llama

M, VOCABULARY = 4, 40
TIMES = {"draft_seconds": 0.3, "verify_seconds": 0.01, "token_seconds": 1.0}
TREE = DecodeConfig(
    verifier="naive",
    drafter="dynamic_tree",
    nodes=6,
    depth=4,
    stop=TreeCost.model_validate(TIMES),
)


def random_head(**sizes: int) -> CandidatesHead:
    """Untrained, with answers that differ from token to token."""
    torch.manual_seed(3)
    made = CandidatesHead(**({"hidden_size": 16, "candidates": M, "width": 8} | sizes)).eval()
    torch.nn.init.normal_(made.output.weight, std=3.0)
    torch.nn.init.normal_(made.rank, std=0.5)
    torch.nn.init.constant_(made.output.bias, 3.0)
    return made


def labels(split: str, count: int, seed: int) -> datasets.Dataset:
    """Rows whose candidates are the draft's own; the target draws the second one if it is even."""
    draft = tiny_draft().eval()

    def with_candidates(row: dict[str, list[int]]) -> dict[str, list[float]]:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.inference_mode():
            logits = draft(input_ids=ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
        best = logits.topk(M).indices
        chances = torch.full(best.shape, 0.05)
        chances[:, 1] = torch.where(best[:, 1] % 2 == 0, 0.8, 0.05)
        return {
            "candidate_ids": best.flatten().tolist(),
            "candidate_prob": chances.flatten().tolist(),
        }

    return synthetic_rows(count, seed, split).map(with_candidates)


def test_a_head_learns_which_candidate_the_target_draws(tmp_path: Path) -> None:
    config = HeadConfig.model_validate(
        {"kind": "candidates", "epochs": 16, "learning_rate": 1e-2, "cache": "disk"}
    )
    result = train_head(
        draft=tiny_draft(),
        train=labels("train", 48, 1),
        dev=labels("dev", 24, 2),
        out=tmp_path / "head",
        config=config,
        seed=0,
        sampling=SamplingConfig(),
    )
    assert result.after.kl < 0.04 < 0.1 < result.after.kl_constant
    head = BaseHead.from_pretrained(tmp_path / "head")
    assert isinstance(head, CandidatesHead)
    assert head.candidates == M


def test_a_probability_that_is_not_known_is_not_learned_from(tmp_path: Path) -> None:
    def unknown(row: dict[str, list[float]]) -> dict[str, list[float]]:
        return {"candidate_prob": [float("nan") if p > 0.5 else p for p in row["candidate_prob"]]}

    result = train_head(
        draft=tiny_draft(),
        train=labels("train", 24, 1).map(unknown),
        dev=labels("dev", 12, 2).map(unknown),
        out=tmp_path / "head",
        config=HeadConfig.model_validate({"kind": "candidates", "epochs": 4}),
        seed=0,
    )
    rows = labels("dev", 12, 2)
    known = np.concatenate(rows["candidate_prob"])
    assert result.after.tokens == int((known < 0.5).sum())
    assert result.after.mean_accept == pytest.approx(0.05)


def test_labels_without_the_targets_probabilities_are_refused(tmp_path: Path) -> None:
    rows = synthetic_rows(4, 0)
    with pytest.raises(ConfigError, match=r"label the rollouts with labels\.candidates"):
        train_head(
            draft=tiny_draft(),
            train=rows,
            dev=rows,
            out=tmp_path,
            config=HeadConfig(kind="candidates"),
            seed=0,
        )


def test_a_level_is_asked_what_training_asks() -> None:
    """The copy in numpy gives the probabilities of `forward`; they sum to less than 1."""
    head = random_head()
    for norm in (head.state_norm, head.token_norm):
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    torch.nn.init.constant_(head.factor, 1.3)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(VOCABULARY, 16, generator=generator)
    states = torch.randn(5, 16, generator=generator)
    q, ids = torch.randn(5, VOCABULARY, generator=generator).mul(4).softmax(-1).topk(M)
    found = Ranker(head, embeddings)(states, q, ids)
    with torch.inference_mode():
        logits = head(states[:, None], embeddings[ids], q.log())
    torch.testing.assert_close(torch.from_numpy(found), logits.sigmoid())
    assert (found.sum(-1) < 1.0).all()
    assert np.isnan(Ranker(head, embeddings)(states, q * torch.nan, ids)).all()


def test_a_tree_has_the_most_probable_paths_by_the_head() -> None:
    """Ranked by enumeration of every path of candidates."""
    draft, head = tiny_llama(1, vocab=VOCABULARY), random_head()
    ranker = Ranker.of(head, draft, VOCABULARY)
    sequence = CachedModel(draft, VOCABULARY, capture_hidden=True).sequence(0, SamplingConfig())
    drafter = DynamicTreeDrafter(sequence, 7, 3, 0.0, frozenset([END]), ranker=ranker)
    with torch.inference_mode():
        for committed in ([2, 3], [4, 1, 5], [3]):
            values = {(): 1.0}
            for depth in range(3):
                for path in [p for p in values if len(p) == depth and END not in p]:
                    out = draft(
                        input_ids=torch.tensor([[*committed, *path]]), output_hidden_states=True
                    )
                    q, ids = out.logits[0, -1:].softmax(-1).topk(M)
                    chances = ranker(out.hidden_states[-1][0, -1:], q, ids)[0].tolist()
                    values |= {
                        (*path, token): values[path] * chance
                        for token, chance in zip(ids[0].tolist(), chances, strict=True)
                    }
            del values[()]
            drafter.reset()
            tree = drive(drafter.propose(committed, 9, torch.Generator()))
            paths = [
                tuple(tree.token_list[node - 1] for node in tree.path_to(last))
                for last in range(1, len(tree) + 1)
            ]
            assert sorted(paths) == sorted(sorted(values, key=lambda p: -values[p])[:7])


def test_nodes_and_levels_are_drafted_while_they_pay() -> None:
    costs = TreeCost.model_validate(TIMES).start(None)
    assert costs.least == pytest.approx(0.01)
    # .6 is expected of the next level, too: .36 tokens for .3 s of drafting and .01 a node.
    assert costs.goes_on(0.6, 1.0, 5)
    assert not costs.goes_on(0.6, 1.0, 7)
    assert not costs.goes_on(0.3, 0.6, 2)


def test_times_that_are_not_given_are_measured() -> None:
    """2 s for the target, .1 s for a node, .5 s for a forward of the draft."""
    costs = TreeCost().start(None)
    generator = np.random.default_rng(0)
    emitted = spent = 0.0
    for _ in range(64):
        nodes, forwards = (int(n) for n in generator.integers(1, 5, 2))
        record = Round(nodes, forwards, 1, 2, forwards, 0.5 * forwards, 2.0 + 0.1 * nodes, 0.0)
        costs.observe(record)
        emitted += 2
        spent += 2.0 + 0.1 * nodes + 0.5 * forwards
    assert costs.draft_seconds == pytest.approx(0.5)
    assert costs.verify_seconds == pytest.approx(0.1)
    assert costs.token_seconds == pytest.approx(spent / emitted)


def test_a_round_along_a_text_is_a_round_of_decoding_it() -> None:
    target, draft, head = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40), random_head()
    out = SpeculativeDecoder.from_config(target, draft, TREE, head).generate(
        torch.tensor([2, 5]), max_new_tokens=40, generator=torch.Generator().manual_seed(1)
    )
    sequence = CachedModel(draft, 40, capture_hidden=True).sequence(0, SamplingConfig())
    drafter = DynamicTreeDrafter(
        sequence,
        TREE.nodes,
        TREE.depth,
        0.0,
        frozenset([END]),
        ranker=Ranker.of(head, draft, VOCABULARY),
        costs=TreeCost.model_validate(TIMES).start(None),
    )
    room = len(out.tokens) if out.finish == "eos" else 40
    assert room == len(out.tokens)
    drafted = [len(tree) for tree in rounds_of(drafter, [2, 5], out.tokens.tolist())]
    assert drafted[:-3] == [record.drafted for record in out.rounds][:-3]


def test_a_head_of_the_other_sort_is_refused_with_what_to_do() -> None:
    chains = AcceptanceHead(hidden_size=16, depth=0)
    target, draft = tiny_llama(0), tiny_llama(1)
    with pytest.raises(ConfigError, match="train a head of kind candidates"):
        SpeculativeDecoder.from_config(target, draft, TREE, chains)
    for config in (DecodeConfig(stop="head"), DecodeConfig(stop="cost")):
        with pytest.raises(ConfigError, match="take drafter dynamic_tree with stop tree_cost"):
            SpeculativeDecoder.from_config(target, draft, config, random_head())
    with pytest.raises(ConfigError, match="reads states of width 8"):
        SpeculativeDecoder.from_config(target, draft, TREE, random_head(hidden_size=8))


@pytest.mark.parametrize(
    "bad",
    [
        {"drafter": "chain"},
        {"drafter": "dynamic_tree", "nodes": 5, "depth": 3, "gain": 0.5},
    ],
)
def test_the_rule_of_trees_is_refused_elsewhere(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="grows dynamic trees, without gain"):
        DecodeConfig(verifier="naive", stop="tree_cost", **bad)  # type: ignore[arg-type]


def test_a_method_of_trees_names_its_times() -> None:
    method = MethodConfig.model_validate(
        {
            "name": "head tree",
            "verifier": "naive",
            "drafter": "dynamic_tree",
            "nodes": 8,
            "depth": 4,
            "stop": "tree_cost",
            "draft_seconds": 0.1,
        }
    )
    assert method.unread() == {"drafter dynamic_tree": []}
    assert method.stop.measured == ("verify_seconds", "token_seconds")
    assert method.columns()["stop"] == "tree_cost"


def test_rankings_are_compared_on_the_same_texts_and_only_with_the_heads_own_draft() -> None:
    draft, head = tiny_llama(1, vocab=VOCABULARY), random_head()
    rows = [
        {"example_id": f"{n}", "prompt_ids": [2, n], "completion_ids": [5, 6, 7, n, 3, 9, 4, 8]}
        for n in range(10, 16)
    ]
    given = {"vocabulary": VOCABULARY, "nodes": [1, 30], "depth": 3}
    found = compare_rankings(datasets.Dataset.from_list(rows), draft, head, **given)  # type: ignore[arg-type]
    for tokens in found.values():
        assert min(tokens["draft"].value, tokens["head"].value) >= 1.0
        gain = tokens["head"].value / tokens["draft"].value - 1.0
        assert tokens["head gain"].value == pytest.approx(gain, abs=1e-6)
    # Of many nodes more of a text is among them, whatever ranks them.
    assert found[30]["draft"].value > found[1]["draft"].value
    head.probe = probe_of(tiny_llama(2, vocab=VOCABULARY))
    with pytest.raises(ConfigError, match="trained for another draft"):
        compare_rankings(datasets.Dataset.from_list(rows), draft, head, **given)  # type: ignore[arg-type]


def test_the_oracle_ranks_by_the_targets_own_probabilities() -> None:
    draft, target = tiny_llama(1, vocab=VOCABULARY), tiny_llama(2, vocab=VOCABULARY)
    prompt = torch.tensor([[2, 7, 11]])
    text = target.generate(prompt, do_sample=False, max_new_tokens=12, min_new_tokens=12)
    row = {"example_id": "a", "prompt_ids": [2, 7, 11], "completion_ids": text[0, 3:].tolist()}
    rows = datasets.Dataset.from_list([row])
    head = random_head(candidates=VOCABULARY)
    given = {"vocabulary": VOCABULARY, "nodes": [3], "depth": 3}
    # At temperature 0 the one path with a probability is the text: a round is three and one tokens.
    found = compare_rankings(
        rows, draft, head, target=target, sampling=SamplingConfig(temperature=0.0), **given
    )[3]  # type: ignore[arg-type]
    assert found["target"].value == 4.0
    assert found["draft"].value < 4.0
    # A draft that is the target ranks as the oracle does.
    head.probe = probe_of(target)
    found = compare_rankings(rows, target, head, target=target, **given)[3]  # type: ignore[arg-type]
    assert found["target gain"].value == 0.0
