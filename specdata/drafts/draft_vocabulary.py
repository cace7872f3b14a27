"""Drafts with a reduced vocabulary: they can propose N of their V tokens, the others have q = 0.

At a large vocabulary the output matrix is most of a small draft's cost, and few tokens make up
nearly all of a text. So the matrix keeps N rows. Every verifier stays exact: q is 0 elsewhere, as
it is for tokens that a draft's padding lacks.

On the disk it has the names that vLLM and SGLang know of their drafts: `draft_vocab_size` in
config.json, an output matrix (N, H), `d2t` (N,) int64, what is added to a draft's id to make the
target's, and `t2d` (V,) bool, these tokens. In memory it is the transformers model of
its architecture with another output embedding, whose logits are as wide as ever and -inf at the
other tokens, so all other code sees an ordinary draft.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specdata.errors import ConfigError
from specdata.least_squares import ridge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedConfig, PreTrainedModel

SIZE = "draft_vocab_size"
"""The key of config.json by which a reduced draft is known."""


class ReducedOutput(nn.Module):
    """An output embedding of N tokens whose logits are as wide as the vocabulary.

    Of (N, H) weight, (N,) bias or None, and (N,) int64 increasing ids of the N tokens among V.
    """

    is_matrix = True  # alone makes the logits, of `before(states)`
    is_frozen = False  # engines take the target's own
    vocabulary_ids: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, vocabulary_ids: Tensor, vocabulary: int
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.is_narrow = False
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        # Follows from d2t, which the model itself stores.
        self.register_buffer("vocabulary_ids", vocabulary_ids, persistent=False)

    @property
    def in_features(self) -> int:
        """H of the states that it reads."""
        return self.weight.shape[1]

    def before(self, states: Tensor) -> Tensor:
        """(..., H) states -> (..., H) what the matrix multiplies."""
        return states

    def scores(self, states: Tensor) -> Tensor:
        """(..., H) what `before` gives -> (..., N) logits of the tokens that can be proposed."""
        return nn.functional.linear(states, self.weight, self.bias)

    def keep(self, rows: Tensor) -> None:
        """Propose some of the tokens alone; `rows` are those of `vocabulary_ids`."""
        self.weight = nn.Parameter(self.weight.detach()[rows].clone())
        self.vocabulary_ids = self.vocabulary_ids[rows]

    def forward(self, states: Tensor) -> Tensor:
        """(..., H) states -> (..., V) logits, -inf at the other tokens; see `narrow_logits`."""
        return self.among_all(self.scores(self.before(states)))

    def among_all(self, logits: Tensor) -> Tensor:
        """(..., N) logits -> (..., V), as `forward` gives them."""
        if self.is_narrow:
            return logits
        everywhere = logits.new_full((*logits.shape[:-1], self.vocabulary), float("-inf"))
        return everywhere.index_copy_(-1, self.vocabulary_ids, logits)


@contextmanager
def narrow_logits(model: Any) -> Iterator[None]:
    """Inside, a model gives (..., N) logits of the tokens that it can propose, if it is reduced."""
    output = model.get_output_embeddings()
    if not isinstance(output, ReducedOutput):
        yield
        return
    before, output.is_narrow = output.is_narrow, True
    try:
        yield
    finally:
        output.is_narrow = before


def is_reduced(config: PreTrainedConfig) -> bool:
    """True if a configuration is that of a draft with a reduced vocabulary."""
    return getattr(config, SIZE, None) is not None


def draft_vocabulary_ids(model: Any) -> Tensor | None:
    """(N,) ids that a model can propose, increasing; None if it can propose every token."""
    output = model.get_output_embeddings()
    return output.vocabulary_ids if isinstance(output, ReducedOutput) else None


def reduce_vocabulary(model: PreTrainedModel, vocabulary_ids: Sequence[int]) -> None:
    """Keep of a model's output matrix the rows of the tokens that it can propose, in place.

    The input embedding stays whole, so tied matrices are untied.
    """
    output = model.get_output_embeddings()
    if isinstance(output, ReducedOutput) and len(output.vocabulary_ids) < output.vocabulary:
        raise ConfigError(
            f"the draft can propose {len(output.vocabulary_ids)} tokens already: reduce the draft "
            "that it was made of, or leave its vocabulary as it is"
        )
    of_rows = getattr(output, "of_rows", None)  # of the target's
    if of_rows is None and not isinstance(output, nn.Linear | ReducedOutput):
        raise ConfigError(
            f"{type(model).__name__} has no output embedding that is a linear layer "
            f"({type(output).__name__}), so its vocabulary cannot be reduced"
        )
    ids = torch.tensor(sorted({*vocabulary_ids}), device=output.weight.device)
    if of_rows is not None:
        output = of_rows(ids)
    elif isinstance(output, ReducedOutput):  # as of a new draft in an engine's layout, of all
        output.keep(ids)
    else:
        weight = output.weight.detach()[ids].clone()
        bias = None if output.bias is None else output.bias.detach()[ids].clone()
        output = ReducedOutput(weight, bias, ids, len(output.weight))
    install_output(model, output)


def reduced_class(architecture: type[PreTrainedModel], size: int) -> type[PreTrainedModel]:
    """A class of models to load reduced drafts with, whose output matrix has `size` rows.

    Its `from_pretrained` reads what `save_pretrained` wrote, whatever names an architecture has on
    the disk; what it gives becomes a model of `architecture` again, and `settle` ends the loading.
    """

    class Reduced(architecture):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            rows, width = (whole := self.get_output_embeddings()).weight.shape
            weight = whole.weight.new_empty(size, width)
            bias = None if whole.bias is None else whole.bias.new_empty(size)
            ids = torch.arange(size, device=weight.device)
            install_output(self, ReducedOutput(weight, bias, ids, rows))

    return Reduced


def settle(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model of `reduced_class` that has been loaded the ids of its tokens."""
    output = model.get_output_embeddings()
    vocabulary_ids = model.d2t + torch.arange(len(model.d2t), device=model.d2t.device)
    if not torch.equal(vocabulary_ids, model.t2d.nonzero().squeeze(-1)):
        raise ConfigError("d2t and t2d keep different tokens, or d2t is not in the order of ids")
    output.vocabulary_ids = vocabulary_ids
    return model


@torch.no_grad()
def substitute_row(states: Tensor, logits: Tensor) -> Tensor:
    """The row (H,) that stands for all tokens that a reduced draft left out, in a plain model.

    A plain model gives every token a probability. This row's logit is, as nearly as one row's can
    be (least squares), the smallest that any of its tokens has in the same state, so that what was
    left out gets next to nothing, and the draft goes on proposing what it has learned. Of (n, H)
    states that the output embedding read, and (n, V) logits that it gave.
    """
    smallest = logits.masked_fill(logits.isneginf(), float("inf")).amin(dim=-1)
    return ridge([(states, smallest[:, None])])[:, 0]


@torch.no_grad()
def restore_vocabulary(model: PreTrainedModel, others: Tensor) -> None:
    """Give a reduced draft all rows of its output matrix again, in place.

    `others` is (H,) the row of every token outside its vocabulary (`substitute_row`).
    """
    reduced = model.get_output_embeddings()
    assert isinstance(reduced, ReducedOutput)
    weight = others.to(reduced.weight).repeat(reduced.vocabulary, 1)
    whole = nn.Linear(weight.shape[1], len(weight), bias=reduced.bias is not None, device="meta")
    whole.weight = nn.Parameter(weight.index_copy_(0, reduced.vocabulary_ids, reduced.weight))
    if reduced.bias is not None:
        # The rarest of its tokens are the nearest to those that were left out.
        bias = reduced.bias.min().repeat(reduced.vocabulary)
        whole.bias = nn.Parameter(bias.index_copy_(0, reduced.vocabulary_ids, reduced.bias))
    replace_output(model, whole)
    delattr(model.config, SIZE)
    del model.d2t, model.t2d


def install_output(model: PreTrainedModel, output: ReducedOutput) -> None:
    """Make a model's output embedding a reduced one, and store with it what it keeps."""
    replace_output(model, output)
    ids = output.vocabulary_ids
    setattr(model.config, SIZE, len(ids))
    model.register_buffer("d2t", ids - torch.arange(len(ids), device=ids.device))
    is_kept = torch.zeros(output.vocabulary, dtype=torch.bool, device=ids.device)
    model.register_buffer("t2d", is_kept.index_fill_(0, ids, True))


def replace_output(model: PreTrainedModel, output: nn.Module) -> None:
    """Give a model another output embedding that shares no matrix with the input's."""
    model.set_output_embeddings(output)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    # What save_pretrained takes for copies of other weights, and leaves out.
    model.all_tied_weights_keys = {}
