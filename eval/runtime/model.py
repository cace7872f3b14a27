"""Causal language models that run what texts want to feed, one at a time or in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.runtime.graphs import CapturedModel, Engine, captured
from eval.runtime.kv_cache import KVCache
from eval.runtime.model_checks import check_cache, check_forward, takes_masks
from eval.runtime.sequence import CachedSequence, Forward, lay_out, path_to, places
from specdata.lm_head import capturing_hidden
from specdata.models import known_ids
from specdata.probability import SamplingConfig, to_vocabulary

# Longer pieces are prompts for which a mask of their own would cost more than a graph saves.
LONGEST_PIECE = 256


class CachedModel:
    """Runs what texts want to feed.

    Args:
        model: a transformers causal LM, in eval mode.
        vocabulary: V of the logits: the target's.
        engine: how forwards run; see `eval.runtime.graphs`.
        capture_hidden: also keep each text's `state` (H,): the input of the output embedding (after the
            final norm) at the last token fed, which a SpecDec++ acceptance head reads.

    Raises:
        CacheNotRewindableError: if the model's cache cannot drop tokens (sliding windows, states).
        ConfigError: if its forward takes no positions, or the engine cannot run it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: int,
        *,
        engine: Engine = "eager",
        capture_hidden: bool = False,
    ) -> None:
        check_forward(model)
        layers = check_cache(model.config)
        self.model: Any = model
        self._vocabulary = vocabulary
        self._padded = model.config.get_text_config().vocab_size < vocabulary
        self._watched = capture_hidden
        self._engine = engine
        self._captured: CapturedModel | None = None
        self.renew()
        # Flash attention aligns causal attention as we do.
        self._masks = takes_masks(model)
        # Only this one does without a mask for one token. A graph would keep the length of any
        # other that the model makes for itself.
        self._bare = model.config._attn_implementation == "sdpa"
        # A model looks through its parameters for these each time it is asked.
        self.device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._texts: dict[int, CachedSequence] = {}
        self.cells = KVCache(layers)

    def text(self, row: int, sampling: SamplingConfig) -> CachedSequence:
        """An empty text in a row of the cache; it takes the place of an earlier one there."""
        self._texts[row] = CachedSequence(self, row, sampling)
        return self._texts[row]

    def reset(self) -> None:
        """Forget every text and free the cells."""
        self.cells.free()
        for text in self._texts.values():
            text.reset()

    def renew(self) -> None:
        """Take the graphs of the weights as they are now; they may have changed."""
        if self._engine != "eager":
            self._captured = captured(self.model, self._engine)

    def warm_up(self, feeds: Sequence[tuple[int, int]], nodes: Sequence[int] = ()) -> None:
        """Make the graphs that decoding will need, so that none is made while something is timed.

        Args:
            feeds: numbers of tokens and of rows that a text will be fed with after its prompt.
            nodes: numbers of nodes that a draft tree will grow by.
        """
        if self._captured is None:
            return
        self._fed_prompt(1)  # shows the sizes of the cache
        self._fed_prompt(max(rows for _, rows in feeds))
        text = self._fed_prompt(1)
        for count, rows in feeds:
            self.run(text.append([1] * count, rows))
        for count in nodes if self._masks else ():
            self.run(text.append_tree([1] * count, [0] * count))
            text.accept([])
        self.reset()

    def _fed_prompt(self, rows: int) -> CachedSequence:
        text = CachedSequence(self, 0, SamplingConfig())
        self.run(text.append([1] * 3, rows))
        return text

    def run(self, forward: Forward) -> Tensor:
        """Run one forward: logits (rows, V)."""
        if forward.unrolled:
            return self._run_unrolled(forward)
        text, count, start = forward.text, len(forward.tokens), forward.text.filled
        positions, sees = places(forward)
        if sees is not None:
            mask: Tensor | None = self._hide(sees)[None, None]
        else:
            short = self._captured is not None and count <= LONGEST_PIECE
            wanted = (start > 0 or short) if count > 1 else (short and not self._bare)
            mask = self._causal(start, count) if wanted and self._masks else None
        ids = torch.tensor([forward.tokens], device=self.device)
        at = torch.tensor([positions], device=self.device)
        logits, hidden = self._one(text.row, start, ids, at, mask, forward.rows)
        text.fed(forward)
        if self._watched:
            assert hidden is not None
            text.state = hidden[0, -1]
        return to_vocabulary(logits[0, -forward.rows :], self._vocabulary)

    def run_all(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """Run one forward of each of several texts, together where that pays: logits of each."""
        together = [one for one in forwards if one.text.filled and not one.unrolled]
        alone = [one for one in forwards if not (one.text.filled and not one.unrolled)]
        if len(together) == 1:
            alone, together = list(forwards), []
        found = {id(one): self.run(one) for one in alone}
        if together:
            for one, logits in zip(together, self._run_together(together), strict=True):
                found[id(one)] = logits
        return [found[id(one)] for one in forwards]

    def _one(
        self,
        row: int,
        start: int,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        keep: int,
    ) -> tuple[Tensor, Tensor | None]:
        end = start + ids.shape[1]
        if self._captured is not None and ids.shape[1] <= LONGEST_PIECE:
            states = self.cells.states(row, end)
            if states is not None:
                return self._captured(self._known(ids), positions, mask, states, keep)
        self.cells.place(slice(row, row + 1), start, end)
        return self._eager(self.cells, ids, positions, mask, keep)

    def _eager(
        self, cells: KVCache, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: int
    ) -> tuple[Tensor, Tensor | None]:
        hidden: list[Tensor] = []
        # Hooked only while feeding: decoders that share a model must not slow each other down.
        with capturing_hidden(self.model, hidden.append) if self._watched else nullcontext():
            logits = self.model(
                input_ids=self._known(ids),
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cells,
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        return logits, hidden[0] if hidden else None

    def _known(self, ids: Tensor) -> Tensor:
        return known_ids(ids, self.model) if self._padded else ids

    def _hide(self, sees: Tensor) -> Tensor:
        """The additive mask of a boolean one, in the model's type and on its device."""
        dtype = self._dtype
        hidden = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        return hidden.to(self.device)

    def _causal(self, start: int, count: int) -> Tensor:
        """Mask (1, 1, count, start + count) of consecutive tokens."""
        dtype = self._dtype
        block = torch.full((count, count), torch.finfo(dtype).min, dtype=dtype).triu(1)
        mask = torch.nn.functional.pad(block, (start, 0))
        return mask[None, None].to(self.device)

    def _run_together(self, forwards: Sequence[Forward]) -> list[Tensor]:
        """One forward over all rows up to the last asked for; other rows get tokens unseen."""
        count = max(len(one.tokens) for one in forwards)
        last = max(one.text.row for one in forwards)
        starts = dict.fromkeys(range(last + 1), 0)
        starts |= {row: text.filled for row, text in self._texts.items() if row <= last}
        end = max(starts.values()) + count
        # Rows without a request, and the left of short ones, write where nothing is kept.
        cells = torch.stack([starts[row] + torch.arange(count) for row in range(last + 1)])
        ids = torch.zeros(last + 1, count, dtype=torch.long)
        positions = torch.zeros(last + 1, count, dtype=torch.long)
        sees = torch.arange(end) <= cells.unsqueeze(-1)
        for one in forwards:
            lay_out(one, ids, positions, cells, sees)
        keep = max(one.rows for one in forwards)
        self.cells.place(slice(0, last + 1), max(starts.values()), end, cells=cells.to(self.device))
        logits, hidden = self._eager(
            self.cells,
            ids.to(self.device),
            positions.to(self.device),
            self._hide(sees).unsqueeze(1),
            keep,
        )
        found = []
        for one in forwards:
            one.text.fed(one)
            if hidden is not None:
                one.text.state = hidden[one.text.row, -1]
            found.append(to_vocabulary(logits[one.text.row, -one.rows :], self._vocabulary))
        return found

    def _run_unrolled(self, forward: Forward) -> Tensor:
        """Score a whole tree as a batch of its paths from the root to each leaf."""
        text, parents = forward.text, list(forward.parents)
        nodes = forward.tokens[len(forward.tokens) - len(parents) :]
        unseen = forward.tokens[: len(forward.tokens) - len(parents)]
        assert not text.depths, "only a whole tree can be unrolled"
        leaves = [node for node in range(1, len(nodes) + 1) if node not in parents]
        paths = [path_to(parents, leaf) for leaf in leaves]
        start, longest = text.length, max(map(len, paths))
        ids = torch.tensor(
            [
                [*unseen, *(nodes[node - 1] for node in path), *[0] * (longest - len(path))]
                for path in paths
            ],
            device=self.device,
        )
        count = ids.shape[1]
        at = torch.arange(start, start + count, device=self.device).expand(len(paths), -1)
        cells = self.cells.spread(text.row, start, len(paths))
        cells.place(slice(0, len(paths)), start, start + count)
        mask = self._causal(start, count).expand(len(paths), -1, -1, -1) if start else None
        logits, hidden = self._eager(cells, ids, at, mask, count)
        text.planted(parents)
        # Where each token stands first: the text in the first row, a node on some path.
        spots = [(0, column) for column in range(len(unseen))]
        spots += [
            next(
                (row, len(unseen) + path.index(node))
                for row, path in enumerate(paths)
                if node in path
            )
            for node in range(1, len(nodes) + 1)
        ]
        rows, columns = [row for row, _ in spots], [column for _, column in spots]
        self.cells.gather(text.row, start, cells, rows, [start + column for column in columns])
        text.fed(forward)
        if hidden is not None:
            text.state = hidden[rows[-1], columns[-1]]
        picked = logits[rows[-forward.rows :], columns[-forward.rows :]]
        return to_vocabulary(picked, self._vocabulary)
