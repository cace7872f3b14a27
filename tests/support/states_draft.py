"""Drafts on states, in masks or blocks, and what each must draft by definition."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.drafts.plain import cut
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.verifiers.persistent_residual import PersistentResiduals
from eval.verifiers.rule import Drawn, Verifier
from specdata.drafts.states_network import is_in_blocks, states_input
from specdata.drafts.taps import install
from specdata.lm_head import hidden_states
from specdata.probability import draw_one
from tests.support.block_draft import block_draft, state_in_block
from tests.support.branching import CASES
from tests.support.decoder import PROMPT
from tests.support.families import tiny
from tests.support.target_heads import head_of
from tests.support.tiny import tiny_llama

TAPS = [0, 1, 3]


def states_draft(
    target: PreTrainedModel, seed: int = 5, taps: Sequence[int] = TAPS
) -> PreTrainedModel:
    """Of the target's last layer, with random maps."""
    model = cut(target, [target.config.num_hidden_layers - 1])
    made = install(model, target, taps)
    torch.manual_seed(seed)
    for linear in made.children():
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=0.6)
    return model


def pair(vocab: int = 4, kind: str = "states") -> tuple[PreTrainedModel, PreTrainedModel]:
    target = tiny_llama(0, vocab=vocab, layers=3)
    if kind == "masks":
        draft = tiny_llama(2, vocab=vocab)
        draft.config.depths, draft.config.pard_token = 3, vocab - 1
        return target, draft
    if kind == "mtp":
        target = tiny("glm4_moe", 0, vocab=vocab)
        return target, head_of(target)
    if kind == "short":
        return target, tiny("gpt2", 2, vocab=vocab, n_positions=len(PROMPT) + 1)
    if kind == "blocks":
        return target, block_draft(target, size=4, layers=2, seed=8)
    return target, states_draft(target)


@torch.inference_mode()
def state_after(draft: PreTrainedModel, committed: list[int], path: list[int]) -> Tensor:
    """(H,) the draft's state after a path, all computed anew: the definition."""
    made, ids = states_input(draft), torch.tensor([committed])
    if made is None:
        after = torch.tensor([committed + [draft.config.pard_token] * 2])
        return hidden_states(draft, after)[0, len(committed) - 1 + min(len(path), 2)]
    if is_in_blocks(draft):
        return state_in_block(draft, committed, path)
    x = made(ids)
    begin = 0 if made.reads_first or len(committed) == 1 else 1

    def states() -> Tensor:
        positions = torch.arange(begin, x.shape[1])[None]
        every = torch.ones(positions.shape[1], positions.shape[1]).tril().log()[None, None]
        found: Tensor = draft.base_model(
            inputs_embeds=x[:, begin:], attention_mask=every.to(x), position_ids=positions
        )[0]
        return found

    for token in path:
        x = torch.cat([x, made.after_own(torch.tensor([[token]]), states()[:, -1:])], dim=1)
    return states()[0, -1]


def follows(text: list[int], tokens: list[int]) -> bool:
    """Whether these tokens stand in the text already, after its last one, or go on repeating."""
    joined = text + tokens
    starts = [at + 1 for at, token in enumerate(text[:-1]) if token == text[-1]]
    return any(joined[at : at + len(tokens)] == tokens for at in starts)


class Checked:
    """A verifier that compares the distributions of every draft with their definition."""

    def __init__(
        self, inner: Verifier, draft: PreTrainedModel, prompt: list[int], tolerance: float
    ) -> None:
        self.inner, self.draft, self.committed = inner, draft, [*prompt]
        self.began = len(prompt)  # where the draft begins whose distributions are drafted from
        self.tolerance = tolerance
        self.nodes = 0

    residual_persists = True  # rounds without a draft come here, too

    @property
    def residuals(self) -> PersistentResiduals:
        return self.inner.residuals

    def needs_tail(self, nodes: int) -> bool:
        return self.inner.needs_tail(nodes)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        for node in range(len(tree)):
            path, at = [], tree.parent_list[node]
            while at:
                path.insert(0, tree.token_list[at - 1])
                at = tree.parent_list[at - 1]
            begun, since = self.committed[: self.began], self.committed[self.began :]
            if tree.shape == "chain" and tree.distribution_of(node + 1).max() == 1.0:
                assert follows(begun + since + path, tree.token_list[node:])  # looked up
                self.nodes += 1
                continue
            state = state_after(self.draft, begun, since + path)
            q = self.draft.lm_head(state).softmax(-1)
            self.nodes += 1
            if tree.how == "chosen":  # no distributions, but the draft's most probable tokens
                siblings = tree.parent_list.count(tree.parent_list[node])
                assert tree.token_list[node] in q.topk(siblings).indices.tolist()
                continue
            torch.testing.assert_close(
                tree.distributions[tree.distribution_index[node]],
                q,
                rtol=self.tolerance,
                atol=self.tolerance,
            )
        if len(tree) or self.inner.residual_persists:
            drawn = self.inner.draw(tree, target, generator)
        else:
            drawn = Drawn([], draw_one(target[0], generator), self.inner)
        self.committed += [*(tree.token_list[node - 1] for node in drawn.nodes), drawn.token]
        self.inner = drawn.verifier
        if not self.inner.residuals:  # which are of the distributions of their round
            self.began = len(self.committed)
        return Drawn(drawn.nodes, drawn.token, cast(Verifier, self))


DRAFTED = {
    name: config
    for name, config in CASES.items()
    if not config.stop.needs_head and not config.path_temperatures
}


DRAFTED["dynamic tree"] = DecodeConfig("naive", drafter="dynamic_tree", nodes=4, depth=3)
DRAFTED["lookup"] = DecodeConfig("naive", drafter="lookup", lookup=3, match=1)
DRAFTED["lookup, chain"] = DecodeConfig("token", length=2, lookup=2, match=1)
DRAFTED["lookup, dynamic tree"] = DRAFTED["dynamic tree"].replace(lookup=3, match=2)


def decoded_as_defined(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    config: DecodeConfig,
    prompt: list[int],
    tolerance: float = 1e-9,
    **engine: Any,
) -> None:
    """Decode, and compare every distribution of every round with its definition."""
    nodes = rounds = 0
    for seed in range(3):
        checked = Checked(config.make_verifier(), draft, prompt, tolerance)
        decoder = SpeculativeDecoder.from_config(
            target, draft, config, verifier=cast(Verifier, checked), **engine
        )
        out = decoder.generate(
            torch.tensor(prompt), max_new_tokens=24, generator=torch.Generator().manual_seed(seed)
        )
        nodes += checked.nodes
        rounds += sum(each.drafted > 0 for each in out.rounds)
    assert rounds > 6
    assert nodes > rounds
