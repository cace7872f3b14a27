"""From settings to drafters: what proposes tokens for the sequence in each slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eval.drafting.bidding import BiddingDrafter
from eval.drafting.drafters import BranchingDrafter, ChainDrafter, Drafter, DraftPath
from eval.drafting.dynamic_tree import DynamicTreeDrafter
from specdata.errors import ConfigError
from specdata.sampling import SamplingConfig

if TYPE_CHECKING:
    from eval.decode_config import DecodeConfig
    from eval.runtime.budget import SharedBudget
    from eval.runtime.model import CachedModel
    from heads import BaseHead


def make_drafters(
    config: DecodeConfig,
    models: Sequence[CachedModel],
    head: BaseHead | None,
    ends: frozenset[int],
    budget: SharedBudget | None = None,
) -> Callable[[int], Drafter]:
    """What builds the drafter, with its stopping rule, of a slot.

    Args:
        config: what to draft.
        models: the drafts; more than one only for `config.path_drafts`.
        head: the acceptance head, if there is one.
        ends: token ids after which nothing is drafted.
        budget: what drafters bid for, instead of asking the stopping rule.

    Returns:
        Slot number -> drafter; the number is the slot's row in a batch.

    Raises:
        ConfigError: if the rule needs a head, or paths more drafts, than there are, or the head
            cannot answer what the rule asks.
    """
    wanted = 1 + max(config.path_drafts, default=0)
    if len(models) != wanted:
        raise ConfigError(
            f"path_drafts {config.path_drafts} needs {wanted} draft models, got {len(models)}"
        )
    if config.stop.needs_head and head is None:
        raise ConfigError(f"stop={config.stop.name!r} needs an acceptance head: pass head=...")
    config.stop.check_head(head)
    if budget is not None:
        estimates = config.stop.shared_estimates(head)
        budget.learners.append(estimates.restart)
        return lambda row: BiddingDrafter(
            models[0].sequence(row, config.sampling),
            estimates.start(),
            config.stop.longest,
            ends,
            lambda done: budget.emitted(done.emitted, done.drafted, done.accepted),
        )
    if config.drafter == "chain":
        return lambda row: ChainDrafter(
            models[0].sequence(row, config.sampling), config.stop.start(head), ends
        )
    if config.drafter == "dynamic_tree":
        return lambda row: DynamicTreeDrafter(
            models[0].sequence(row, config.sampling), config.nodes, config.depth, config.gain, ends
        )
    if config.drafter == "tree":
        return lambda row: BranchingDrafter(
            [DraftPath(models[0].sequence(row, config.sampling))], config.widths, config.how, ends
        )
    widths = (config.paths, *[1] * (config.stop.longest - 1))
    return lambda row: BranchingDrafter(
        _paths(config, models, row), widths, "iid", ends, shape="paths"
    )


def _paths(config: DecodeConfig, models: Sequence[CachedModel], row: int) -> list[DraftPath]:
    """How each path of a slot is drafted."""
    sequences = [model.sequence(row, config.sampling) for model in models]
    drafts = config.path_drafts or (0,) * config.paths
    samplings: list[SamplingConfig | None] = [None] * config.paths
    if config.path_temperatures:
        samplings = [
            SamplingConfig(temperature, config.top_k, config.top_p)
            for temperature in config.path_temperatures
        ]
    return [
        DraftPath(sequences[d], sampling) for d, sampling in zip(drafts, samplings, strict=True)
    ]
