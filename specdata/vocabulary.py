"""Target and draft must mean the same thing by a token id."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from specdata.errors import VocabularyMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3


def vocabulary_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short hash of a tokenizer's vocabulary, stored with everything made with it."""
    pairs = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()[:16]


def check_shared_vocabulary(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> None:
    """Compare two tokenizers id by id. Sizes of embedding matrices may differ by padding.

    Raises:
        VocabularyMismatchError: naming the first ids that differ.
    """
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    wrong = [index for index in sorted({*ours, *theirs}) if ours.get(index) != theirs.get(index)]
    if wrong:
        first = ", ".join(
            f"{index} is {ours.get(index)!r} in the target and {theirs.get(index)!r} in the draft"
            for index in wrong[:SHOWN]
        )
        raise VocabularyMismatchError(
            f"target and draft must share a vocabulary; {len(wrong)} ids differ (first: {first}). "
            "Use a draft of the target's own family, or train one on the target's tokenizer"
        )
