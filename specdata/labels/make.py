"""Labels: what one draft would have proposed along the target's completions, and its acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdata.config import LabelsConfig
from specdata.errors import ManifestError, NotFiniteError
from specdata.lm_head import LMHead, find_lm_head
from specdata.prepack import prepacked
from specdata.probability import (
    SamplingConfig,
    accept_probability,
    entropy,
    inverse_cdfs,
    overlap,
    probabilities,
    to_vocabulary,
)
from specdata.sampling import generator_for
from specdata.storage.columns import arrow_parts
from specdata.storage.dataset import fill_dataset, load_stored, read_manifest
from specdata.storage.resume import Settings, differences
from specdata.storage.schema import LABELS, MORE_DRAWS, Label, Rollout
from specdata.texts import (
    ModelSource,
    Source,
    TextBatch,
    TopLogitSource,
    readable_rows,
    text_columns,
    tokens_at_once,
)
from specdata.top_logits import TopLogits, check_decided


def make_labels(
    target: PreTrainedModel | TopLogits,
    draft: PreTrainedModel,
    rollouts: datasets.Dataset,
    folder: Path,
    config: LabelsConfig,
    *,
    sampling: SamplingConfig,
    seed: int,
    settings: Settings,
    report: Callable[[int], object],
) -> int:
    """Label every position of every rollout that the draft reads, under the sampler of serving.

    One teacher-forced pass of each model, in batches that the shard alone decides. With
    `config.draws` = S above 1, rows of split "train" get S - 1 more tokens of the draft at each
    position, in the columns `MORE_DRAWS`; no draw depends on S. `fill_dataset` describes several
    processes, resume and errors.

    From top logits, which the rollouts must be stored with (columns of `LOGITS`), the target is not
    run (`TopLogitDistributions` says what is exact then). A rollout with positions that they do not
    decide is stored in parts, without them.
    """
    q = find_lm_head(draft)
    source: Source
    if isinstance(target, TopLogits):
        source, heads = TopLogitSource(target.distributions(sampling, bound=config.bound)), [q]
        check_decided(rollouts, source.distributions)
        settings = settings.extended({"bound": config.bound})
    else:
        heads = [find_lm_head(target), q]
        source = ModelSource(heads[0], sampling)
    # At temperature 0 every draw is the most probable token, too.
    draws = 1 if config.greedy or sampling.temperature == 0 else config.draws
    at_once = tokens_at_once(*heads)
    label = Labeller(source, q, sampling, seed, at_once, draws, config.greedy)

    def shard(start: int) -> list[Label]:
        stop = min(start + config.shard_size, len(rollouts))
        made = label(rollouts.select(range(start, stop)).to_list())
        report(stop - start)
        return made

    decided_by = {
        "sampling": asdict(sampling),
        "seed": seed,
        "vocabulary": source.vocabulary,
        "draws": draws,
        "greedy": config.greedy,
    }
    with prepacked(*(head.model for head in heads)):
        return fill_dataset(
            folder,
            pa.schema([*LABELS, *(MORE_DRAWS if draws > 1 else ())]),
            settings.extended(decided_by),
            [partial(shard, start) for start in range(0, len(rollouts), config.shard_size)],
            report,
        )


def are_greedy(folder: Path) -> bool:
    """True if labels are of likeliest tokens where the draft's tokens are drawn."""
    settings = read_manifest(folder)["settings"]
    return bool(settings.get("greedy")) and settings["sampling"]["temperature"] > 0


def load_labels(folder: Path, sampling: SamplingConfig) -> datasets.Dataset:
    """Read labels that were made under this sampler."""
    stored = read_manifest(folder)["settings"].get("sampling")
    if changed := differences(stored or {}, asdict(sampling)):
        raise ManifestError(
            f"the labels in {folder} were made under another sampler than the one asked for: label "
            "the rollouts again, or ask for theirs. Stored -> asked:\n  " + "\n  ".join(changed)
        )
    return load_stored(folder)


def mean_overlap(labels: datasets.Dataset) -> dict[str, float]:
    """Mean of sum_x min(p, q) over all positions of each "set/split"."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for _, rows in arrow_parts(labels, "dataset", "split", "overlap"):
        names = pc.binary_join_element_wise(rows["dataset"], rows["split"], "/")
        of_rows = names.take(pc.list_parent_indices(rows["overlap"]))
        values = pa.table({"name": of_rows, "overlap": pc.list_flatten(rows["overlap"])})
        added = values.group_by("name", use_threads=False).aggregate(
            [("overlap", "sum"), ("overlap", "count")]
        )
        for each in added.to_pylist():
            sums[each["name"]] += each["overlap_sum"]
            counts[each["name"]] += each["overlap_count"]
    return {name: total / max(1, counts[name]) for name, total in sums.items()}


DECIDED = "decided"


@dataclass(frozen=True, slots=True)
class Labeller:
    """Labels rows: Y_i ~ q(. | prompt, X_<i) and min(1, p(Y_i)/q(Y_i)) at each position i.

    SpecDec++ (Huang et al., arXiv:2405.19715), section 4.1. The models cost most, so several
    independent Y a position (`draws`) are cheap: rows of split "train" have them. With `greedy`, Y
    is the likeliest token, which is accepted with p(Y).
    """

    source: Source
    draft: LMHead
    sampling: SamplingConfig
    seed: int
    tokens_at_once: int
    draws: int = 1
    greedy: bool = False

    def __call__(self, rows: Sequence[Rollout]) -> list[Label]:
        """Label the rows, as far as the draft reads; those with undecided positions in parts."""
        rows = readable_rows(rows, self.draft.model)

        def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
            read_p = self.source.distributions_of(batch, rows)
            states = batch.states(self.draft, rows, self.source.vocabulary)
            uniforms = torch.cat(
                [_uniforms(rows[example], self.seed, self.draws) for example in batch.examples]
            ).to(states.device)

            def read_chunk(chunk: slice) -> dict[str, Tensor]:
                logits = to_vocabulary(self.draft.logits(states[chunk]), self.source.vocabulary)
                q = probabilities(logits, self.sampling)
                p, _, decided = read_p(chunk, q)
                return {**_compare(p, q, uniforms[chunk], greedy=self.greedy), DECIDED: decided}

            return read_chunk

        columns_of = text_columns(
            rows,
            read,
            vocabulary=self.source.vocabulary,
            tokens_at_once=self.tokens_at_once,
            device=self.draft.model.device,
        )
        labels = []
        for row, columns in zip(rows, columns_of, strict=True):
            if bool(columns["overlap"].isnan().any()):
                by_draft = bool(columns["log_q"].isnan().any())
                name = self.draft.model.config.name_or_path
                raise NotFiniteError(name if by_draft else "the target of these rollouts")
            if self.draws > 1 and row["split"] != "train":
                columns |= {name: torch.empty(0) for name in MORE_DRAWS.names}
            labels += _decided_parts(row, columns)
        return labels


def _decided_parts(row: Rollout, columns: dict[str, Tensor]) -> list[Label]:
    """A row with its (C, ...) columns; where positions are left out, what lies between them.

    The text before a part goes to its prompt, so its labels stand where they stood.
    """
    ids, size = row["completion_ids"], len(row["completion_ids"])
    ends = [*(~columns.pop(DECIDED)).nonzero().flatten().tolist(), size]
    parts = []
    for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        if begin == end:
            continue
        text = {
            "prompt_ids": row["prompt_ids"] + ids[:begin],
            "completion_ids": ids[begin:end],
            "finish": row["finish"] if end == size else "length",
        }
        part = {name: values[begin:end].flatten().tolist() for name, values in columns.items()}
        parts.append(cast(Label, {**row, **text, **part}))
    return parts


def _compare(p: Tensor, q: Tensor, uniforms: Tensor, *, greedy: bool) -> dict[str, Tensor]:
    """Columns to store of p and q, (C, V), for the tokens that the uniforms (C, S) draw from q."""
    drafted = inverse_cdfs(q, uniforms).clamp(min=0)  # where there is none, log q is NaN
    if greedy:
        drafted = q.argmax(dim=-1, keepdim=True)
    read_p, q_at = p.gather(-1, drafted), q.gather(-1, drafted)
    accept = read_p.clamp(max=1.0) if greedy else accept_probability(read_p, q_at)
    more = (
        {"more_draft_ids": drafted[:, 1:], "more_accept_prob": accept[:, 1:]}
        if uniforms.shape[-1] > 1
        else {}
    )
    return {
        "draft_ids": drafted[:, 0],
        "accept_prob": accept[:, 0],
        # A drafted token that the target gives 0 has log p = -inf; parquet stores it as such.
        "log_p": read_p[:, 0].log(),
        "log_q": q_at[:, 0].log(),
        "log_q_max": q.amax(dim=-1).log(),
        "entropy": entropy(q),
        "overlap": overlap(p, q),
        **more,
    }


def _uniforms(row: Rollout, seed: int, draws: int) -> Tensor:
    """(C, S) uniforms of a row. Each draw has its own generator, so S does not change any."""
    key = (row["example_id"], row["sample"])
    if turn := row.get("turn", 0):
        key = (*key, turn)  # type: ignore[assignment]
    names = ["label", *(f"label draw {draw}" for draw in range(1, draws))]
    generators = [generator_for(seed, name, *key) for name in names]
    length = len(row["completion_ids"])
    uniforms = [torch.rand(length, generator=one, dtype=torch.float64) for one in generators]
    return torch.stack(uniforms, dim=-1)
