"""The sizes of a language model, read off its config.json: what its weights and its work take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# GPT-2 and its kin have other names for the same.
NAMES = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
NEEDED = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
# Of a mixture of experts: how many there are follows from other names in each family.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a dense decoder, in numbers (not bytes).

    Attributes:
        layers: how many decoder layers.
        width: H, of the hidden states.
        inner: width inside of an MLP.
        queries: numbers of a token's queries in a layer, heads x head size.
        keys: of its keys, key heads x head size; as many are its values.
        vocabulary: V, rows of the input embedding.
        output: rows of an output matrix of its own; 0 if it is the input embedding.
        is_gated: whether an MLP has three matrices, as Llama's, or two.
    """

    layers: int
    width: int
    inner: int
    queries: int
    keys: int
    vocabulary: int
    output: int
    is_gated: bool

    @classmethod
    def of(cls, known: Mapping[str, Any], kept: int | None = None) -> ModelSizes | None:
        """Read a config.json.

        Args:
            known: what it says of the language model.
            kept: rows of the output matrix, if its vocabulary is reduced.

        Returns:
            None if it does not say enough, or the model is no dense decoder.
        """
        found: dict[str, Any] = {
            name: next((known[other] for other in others if known.get(other)), None)
            for name, others in NAMES.items()
        }
        given = {name: value for name, value in found.items() if value is not None}
        # Some families have a list of them, one for each layer.
        if not given.keys() >= NEEDED or not all(isinstance(each, int) for each in given.values()):
            return None
        if any(known.get(name) for name in EXPERTS):
            return None
        width, vocabulary = found["hidden_size"], found["vocab_size"]
        heads = found["num_attention_heads"]
        size = found["head_dim"] or width // heads
        # transformers leaves out of config.json what is tied by default: in few architectures,
        # GPT-2's among them.
        tied = known.get("tie_word_embeddings", "n_embd" in known)
        rows = kept or known.get("draft_vocab_size") or (0 if tied else vocabulary)
        return cls(
            layers=found["num_hidden_layers"],
            width=width,
            inner=found["intermediate_size"] or 4 * width,
            queries=heads * size,
            keys=(found["num_key_value_heads"] or heads) * size,
            vocabulary=vocabulary,
            output=int(rows),
            is_gated="rms_norm_eps" in known,
        )

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers."""
        attention = 2 * self.width * (self.queries + self.keys)
        return self.layers * (attention + (2 + self.is_gated) * self.width * self.inner)

    @property
    def embeddings(self) -> int:
        """Weights of the input embedding and of an output matrix of its own."""
        return self.width * (self.vocabulary + self.output)

    @property
    def parameters(self) -> int:
        """All weights; biases, which few models have, are left out."""
        return self.matrices + self.embeddings + (2 * self.layers + 1) * self.width

    @property
    def logits(self) -> int:
        """Tokens whose logits the output matrix makes."""
        return self.output or self.vocabulary
