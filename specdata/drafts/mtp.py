"""The heads that targets bring along (multi-token prediction, NextN), family by family.

A head reads the target's last state at a token and the embedding of the next one, and predicts the
token after that. Texts are exact whatever it is fed; only acceptance tells, and engines differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from specdata.drafts.kind import ConfigJson, DraftKind, Served, has_record


@dataclass(frozen=True, slots=True)
class Convention:
    """How a head is fed.

    Attributes:
        state_first: its projection reads a state before the embedding, not behind it.
        normed_target: the target's states are read after its final norm.
        normed_own: the head's own states are fed back after its last norm.
        zero_first: the embedding at position 0, that of the second token, counts as 0.
        reads_first: the first token is read, too, behind a state of zeros.
        last_norm: a norm of the head's own stands before the output matrix.
        rotates_halves: positions turn the halves of a query and key, where the target turns pairs.
    """

    state_first: bool = False
    normed_target: bool = True
    normed_own: bool = True
    zero_first: bool = False
    reads_first: bool = False
    last_norm: bool = True
    rotates_halves: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What is said of it under `FEEDING`."""
        norm = {True: "after", False: "before"}
        kept = "kept, after token 0" if self.reads_first else "kept"
        return (
            "state, embedding" if self.state_first else "embedding, state",
            norm[self.normed_target],
            norm[self.normed_own] if self.last_norm else "no norm",
            "zero" if self.zero_first else kept,
            "halves" if self.rotates_halves else "target's",
        )


FEEDING = ("halves", "target's state", "recycled state", "first embedding", "rotary")
"""Which half the projection reads first, states as to the last norm of target and head, the
embedding at position 0, that of token 1, and what positions turn."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the heads of a family of targets.

    Attributes:
        layer: how the names of the layer's tensors begin; {} is the number of the target's layers.
        parts: ours -> theirs, how the names of its other tensors begin: `PARTS`.
        engines: an engine -> what it feeds it, in the version of `VERSIONS`.
        counts: keys of config.json that say how many such layers there are; engines read the first.
        settings: of a model that has one layer of this kind.
    """

    layer: str
    parts: Mapping[str, str]
    engines: Mapping[str, Convention]
    counts: tuple[str, ...] = ("num_nextn_predict_layers",)
    settings: ConfigJson = field(default_factory=dict)


VERSIONS = {"vllm": "0.32", "sglang": "0.5.23", "llama.cpp": "of llama-cpp-python 0.3.36"}
"""The engines whose sources were read. Each drafts every token with the first of several layers,
but vLLM's second runner (GPUs), SGLang's multi_layer_eagle and llama.cpp, which take the k-th."""


def _fed(vllm: Convention, *, in_llama: bool) -> dict[str, Convention]:
    """By engine: the others read states after norms everywhere, and no embedding as 0.

    llama.cpp's converter leaves some heads out (DeepSeek V3, ERNIE) or knows no such target
    (Bailing V2.5), and it loads EXAONE's without a graph for it.
    """
    fed = {"vllm": vllm, "sglang": Convention()}
    return fed | ({"llama.cpp": Convention(reads_first=True)} if in_llama else {})


PARTS = ("fc", "embedding_norm", "state_norm", "norm")
"""The projection of both halves, the norm of each, and the norm before the output matrix."""
FIRST = "first"
"""As a setting: what config.json says of a head's layers (mtp_...), or the target's first has."""


def _inside(settings: ConfigJson, *counts: str, in_llama: bool = True) -> Family:
    """Of layers that stand beside the target's."""
    parts = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    return Family(
        "mtp.layers.0.",
        dict(zip(PARTS, parts, strict=True)),
        _fed(Convention(), in_llama=in_llama),
        (*counts, "num_nextn_predict_layers"),
        settings,
    )


def _behind(
    settings: ConfigJson,
    norm: str = "shared_head.norm",
    *,
    in_llama: bool = True,
    normed_own: bool = True,
) -> Family:
    """Of layers that stand behind the target's."""
    layer = "model.layers.{}."
    parts = (f"{layer}{name}" for name in ("eh_proj", "enorm", "hnorm", norm))
    return Family(
        layer,
        dict(zip(PARTS, parts, strict=True)),
        _fed(Convention(zero_first=True, normed_own=normed_own), in_llama=in_llama),
        settings=settings,
    )


_FULL: ConfigJson = {"layer_types": ["full_attention"]}
_DENSE: ConfigJson = {"mlp_layer_types": ["dense"], "first_k_dense_replace": 1}
_SPARSE: ConfigJson = {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
_ERNIE = Convention(zero_first=True, last_norm=False)
FAMILIES: Mapping[str, Family] = {
    "qwen3_next": _inside({**_FULL, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    "qwen3_5_text": _inside(_FULL, "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": _inside(_FULL, "mtp_num_hidden_layers"),
    "exaone_moe": _inside({**_DENSE, "layer_types": FIRST}, in_llama=False),
    "deepseek_v3": _behind(_SPARSE, in_llama=False),
    "glm4_moe": _behind(_SPARSE, normed_own=False),
    "glm4_moe_lite": _behind(_SPARSE, normed_own=False),
    "hy_v3": _behind(_SPARSE, "final_layernorm"),
    "bailing_hybrid": _behind({**_SPARSE, **_FULL}, "final_layernorm", in_llama=False),
    "ernie4_5_moe": Family(
        "model.mtp_block.0.",
        {
            "fc": "model.mtp_linear_proj.0",
            "embedding_norm": "model.mtp_emb_norm.0",
            "state_norm": "model.mtp_hidden_norm.0",
        },
        {"vllm": replace(_ERNIE, rotates_halves=True), "sglang": _ERNIE},
        settings={"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
}
"""`model_type` of a target, or of the language model in it -> its heads."""


def fed_by(model_type: str, convention: Convention) -> str:
    """The engines that feed a family's heads so, with their versions, in words."""
    engines = FAMILIES[model_type].engines
    return ", ".join(f"{each} {VERSIONS[each]}" for each in engines if engines[each] == convention)


MTP = DraftKind(
    "mtp",
    is_of=has_record("mtp"),
    served=Served(method="mtp", tags=("mtp", "vllm", "sglang", "llama-cpp"), in_target=True),
    reads_states=True,
    record_key="mtp",
    record_class=Convention,
    taps_of=lambda _taps, count: [count],
    targets=tuple(FAMILIES),
    most_layers=1,
    layouts={"mtp": "the target's own head (MTP, NextN)"},
    section=(
        "init: {kind: mtp}, readings: 3, optimizer: muon, learning_rate: 1e-3, start_share: 0.25"
    ),
)
