"""The memory that each stage needs at its peak, from configurations alone; torch is not imported.

What is counted are the arrays that grow with the models and with the work, in each process, on its
device: weights, gradients, optimizer, activations, keys and values, logits. What is not: libraries
(some 0.7 GB of a process's own memory, a CUDA context), small arrays, fragmentation. The sum lies
within a factor `WITHIN` of the measured peak (`benchmarks/stage_memory.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from eval.measuring.methods import MethodConfig, path_drafts
from recipes.config import PipelineConfig
from recipes.layout import head_bytes, initial_sizes, sizes_of
from recipes.model_sizes import ModelSizes
from specdata.errors import ConfigError
from specdata.loading import Loading, Role
from specdata.processes import process_count
from specdata.prompts.config import PromptSet
from specdata.prompts.reading import is_remote, raw_prompts

WITHIN = 1.5
"""The factor within which a stage's peak was measured to lie."""
LIBRARIES = 0.7e9
"""Bytes of memory of a process that has imported the libraries and done nothing."""
FLOAT32, DOUBLE, ID = 4, 8, 8
NUMBER = {"float32": 4, "bfloat16": 2, "float16": 2}
# A weight in 4 bits (NF4) has a share of .127 bits of constants (QLoRA, arXiv:2305.14314,
# section 3); one in 8 bits (LLM.int8) of nearly none.
PACKED = {4: (4 + 0.127) / 8, 8: 1.0}
# Of modules that import torch; a test compares them.
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}  # specdata.labels.labeller, specdata.rollouts.backend
LABEL_VALUES, LABEL_POSITIONS = 1 << 20, {"cpu": 32, "cuda": 256}  # specdata.labels.labeller
GROWTH = 1.5  # specdata.rollouts.backend
LARGEST_COPY = 4 << 30  # specdata.prepack
KEPT_BYTES = 1 << 30  # distill.teacher, distill.watch
WATCH_VALUES = 1 << 22  # distill.watch
CHUNK_BYTES, ENTRY_BYTES = 1 << 30, 52  # distill.chunked
HEAD_VALUES = 1 << 24  # heads.contexts
CAPACITY_STEP = 256  # eval.runtime.kv_cache
TREE_VALUES, TREE_ENTRY = 1 << 21, 8 * DOUBLE  # eval.analysis.tree_trace
LIVE = 10**9  # weights: stage3_max_live_parameters of DeepSpeed
DRAFTED = 16  # nodes that are verified together, generously
# Values of a position's distributions that stand side by side: logits, softmax, and what compares
# p and q; of a draft's alone.
LABEL_ENTRY, HEAD_ENTRY = 6 * FLOAT32, 3 * FLOAT32
# Prompts that are read to guess how long they are, and the bytes of text that a token stands for
# (English has four or more, so this errs towards more tokens); where none can be read here.
READ, TOKEN_TEXT, UNREAD = 500, 3, 256


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs a stage here.

    Attributes:
        kind: "cpu" or "cuda".
        devices: GPUs on this machine; 1 on a CPU.
        memory: bytes of the smallest device, or of memory that is free; None if not known.
    """

    kind: str
    devices: int = 1
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Sharding:
    """What of a trained model the processes of a launch divide among themselves.

    ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054): stage 1 divides the optimizer's states, stage
    2 the gradients, too, stage 3 the weights, too. FSDP2 divides all three.

    Attributes:
        processes: of the launch.
        stage: 0 to 3.
        is_deepspeed: keeps another float32 copy of the weights that it divides.
        offload: whether optimizer states lie in the memory of the CPU.
        bucket: numbers of a buffer in which gradients are joined.
    """

    processes: int = 1
    stage: int = 0
    is_deepspeed: bool = False
    offload: bool = False
    bucket: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that each process holds at a stage's peak.

    Attributes:
        parts: what for -> bytes.
    """

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.parts.values())


def machine() -> Machine:
    """What is here, without torch: nvidia-smi tells of GPUs, /proc/meminfo of memory."""
    if _has_cuda_torch() and (gpus := _gpus()):
        return Machine("cuda", len(gpus), min(gpus))
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:
        return Machine("cpu")
    free = next((line for line in lines if line.startswith("MemAvailable")), None)
    return Machine("cpu", 1, int(free.split()[1]) * 1024 if free else None)


def _has_cuda_torch() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    try:
        return not (hidden or on_cpu or version("torch").endswith("+cpu"))
    except PackageNotFoundError:
        return False


def _gpus() -> list[float]:
    """Bytes of each GPU that this process may use."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        sizes = [float(line) * 2**20 for line in done.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return sizes[: visible.count(",") + 1] if visible else sizes


def sharding() -> Sharding:
    """What the launcher has set up: accelerate passes it on in the environment."""
    given, processes = os.environ, process_count()
    if _is_on(given.get("ACCELERATE_USE_FSDP")):
        return Sharding(processes, 3)
    if not _is_on(given.get("ACCELERATE_USE_DEEPSPEED")):
        return Sharding(processes)
    stage, offload = (
        given.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        given.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
    )
    zero: Mapping[str, Any] = {}
    if path := given.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
        try:
            zero = json.loads(Path(path).read_text("utf-8")).get("zero_optimization", {})
        except (OSError, ValueError) as error:
            raise ConfigError(f"the launcher's {path} cannot be read: {error}") from error
        stage, offload = zero.get("stage"), zero.get("offload_optimizer", {}).get("device", "none")
    bucket = zero.get("reduce_bucket_size", 5e8)
    return Sharding(
        processes,
        int(stage) if stage is not None and str(stage).isdecimal() else 0,
        True,
        offload not in ("none", None),
        int(bucket) if isinstance(bucket, int | float) else 0,
    )


def _is_on(flag: str | None) -> bool:
    return (flag or "").lower() in ("1", "true", "yes")


def weights_bytes(sizes: ModelSizes, load: Loading, here: Machine, processes: int) -> float:
    """Weights of a model that only reads them, on each process's device.

    Matrices of layers in `bits`, all else in `dtype`. Tensor parallelism divides the matrices over
    the processes, `device_map` whole layers over the GPUs of this machine, as far as they go.
    """
    assert load.dtype is not None
    number = NUMBER[load.dtype]
    matrices = sizes.matrices * (PACKED[load.bits] if load.bits else number)
    if load.tp_plan:
        matrices /= processes
    whole = float(matrices + (sizes.parameters - sizes.matrices) * number)
    if here.kind == "cpu" and load.is_spread and load.offload_folder:
        return min(whole, _in_bytes((load.max_memory or {}).get("cpu", "1000000GB")))
    if here.kind == "cpu" or load.device_map is None:
        return whole
    if load.device_map == "cpu":
        return 0.0
    limits = [_in_bytes(size) for place, size in (load.max_memory or {}).items() if place != "cpu"]
    return min(whole / here.devices, max(limits, default=math.inf), here.memory or math.inf)


def _in_bytes(size: str) -> float:
    """A size of `max_memory`, such as 20GiB or 500MB."""
    number, unit = re.fullmatch(r"([\d.]+)([KMG]i?B)", size).groups()  # type: ignore[union-attr]
    base = 1024 if "i" in unit else 1000
    return float(number) * float(base ** ("KMG".index(unit[0]) + 1))


def copy_bytes(sizes: ModelSizes, load: Loading, here: Machine) -> float:
    """Copies of the matrices in oneDNN's layout (`specdata.prepack`): on a CPU, of small models."""
    assert load.dtype is not None
    copy = float(NUMBER[load.dtype] * (sizes.matrices + sizes.width * sizes.logits))
    is_plain = not (load.bits or load.is_spread or load.tp_plan)
    return copy if here.kind == "cpu" and is_plain and copy <= LARGEST_COPY else 0.0


def cache_bytes(sizes: ModelSizes, rows: int, tokens: int, number: int) -> float:
    """Keys and values: 2 x layers x their width x rows x tokens x bytes of a number."""
    return 2.0 * sizes.layers * sizes.keys * rows * tokens * number


def read_bytes(sizes: ModelSizes, tokens: int, number: int) -> float:
    """Activations of a forward that records no gradients: those of its widest layer.

    A token has the residual, its norm, and in attention queries, keys, values and the output, in an
    MLP the widths inside. Scores are never there in full (SDPA).
    """
    attention = 2 * sizes.queries + 2 * sizes.keys
    mlp = (1 + 2 * sizes.is_gated) * sizes.inner
    return float(tokens * (3 * sizes.width + max(attention, mlp)) * number)


def activation_bytes(
    sizes: ModelSizes, tokens: int, *, in_bfloat16: bool = False, checkpointed: bool = False
) -> float:
    """Activations that the backward pass needs, all layers', after Korthikanti et al. 2022.

    arXiv:2205.05198, section 4, for a layer of Llama in transformers without dropout: of two norms
    the input, the normed and the output (6 H), queries, keys, values, and the output of attention
    twice, before and after heads are joined; of a gated MLP four widths inside. Norms are in
    float32, matrix products under autocast in bfloat16. With checkpointing a layer keeps its input
    alone, and one layer at a time has all.
    """
    number = 2 if in_bfloat16 else FLOAT32
    inside = 3 * sizes.queries + 2 * sizes.keys + (2 + 2 * sizes.is_gated) * sizes.inner
    layer = tokens * (4 * sizes.width * FLOAT32 + (2 * sizes.width + inside) * number)
    if checkpointed:
        return float(sizes.layers * tokens * sizes.width * FLOAT32 + layer)
    return float(sizes.layers * layer)


def training_parts(
    whole: float, trained: float, matrices: float, optimizer: str, shards: Sharding, here: Machine
) -> dict[str, float]:
    """Weights, gradients and optimizer states of a model in training, all in float32.

    AdamW keeps two numbers a weight, Muon one for the matrices of layers (`distill.muon`). ZeRO
    divides by `Sharding`; DeepSpeed's own copy of the weights is divided from stage 1 on.

    Args:
        whole: weights in all.
        trained: those that are trained.
        matrices: of them, matrices of layers.
        optimizer: "adamw" or "muon".
        shards: what processes divide.
        here: what runs it.
    """

    def share(stage: int) -> float:
        return 1 / shards.processes if shards.stage >= stage else 1.0

    kept = 2 * trained - (matrices if optimizer == "muon" else 0)
    if shards.is_deepspeed and shards.stage:
        kept += trained
    bucket: float = 0
    if shards.is_deepspeed:
        # A CPU only has what is written to of the buffer.
        bucket = min(shards.bucket, trained) if here.kind == "cpu" else shards.bucket
    elif shards.processes > 1 and not shards.stage:
        bucket = trained  # DDP joins copies of all gradients, unless they are views
    return {
        "weights in training": FLOAT32 * whole * share(3),
        "gradients": FLOAT32 * trained * share(2),
        "optimizer": 0.0 if shards.offload else FLOAT32 * kept * share(1),
        "gradient bucket": float(FLOAT32 * bucket),
    }


def prompt_tokens(sets: Sequence[PromptSet], seed: int, most: int | None = None) -> int:
    """Tokens of a long prompt: guessed of the texts of sets on this machine.

    Args:
        sets: where prompts come from.
        seed: the run's.
        most: what a model has positions for.
    """
    longest = max((_longest(wanted, seed) for wanted in sets), default=UNREAD)
    return min(longest, most or longest)


def _longest(wanted: PromptSet, seed: int) -> int:
    """Tokens of the longest of the first prompts of a set."""
    try:
        if is_remote(wanted):
            return UNREAD
        prompts = list(islice(raw_prompts(wanted, seed, has_template=True), READ))
    except ConfigError:  # a finished run is planned without its prompts, too
        return UNREAD
    texts = [
        [message["content"] for message in prompt.messages] or [prompt.text]
        for prompt in prompts
        if not isinstance(prompt, str)
    ]
    sizes = (sum(len(text.encode(errors="replace")) for text in each) for each in texts)
    return math.ceil(max(sizes, default=TOKEN_TEXT) / TOKEN_TEXT)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the memory and the work of a run's stages follow from.

    Attributes:
        config: the run.
        target: sizes of the target; None if they are not known here.
        draft: sizes of the draft that is trained or used.
        prompt: tokens of a long prompt of the rollouts.
        here: what runs it.
        shards: how processes divide a trained model.
    """

    config: PipelineConfig
    target: ModelSizes | None
    draft: ModelSizes | None
    prompt: int
    here: Machine
    shards: Sharding

    @classmethod
    def of(cls, config: PipelineConfig) -> Setting:
        """What is known without loading anything."""
        known = sizes_of(config, config.models.target)
        most = known.get("max_position_embeddings", known.get("n_positions"))
        return cls(
            config,
            ModelSizes.of(known),
            ModelSizes.of(*initial_sizes(config)),
            prompt_tokens(config.rollouts.sets, config.seed, most),
            machine(),
            sharding(),
        )

    def load(self, role: Role) -> Loading:
        """How a model is loaded."""
        return self.config.models.loading(role)

    def number(self, role: Role) -> int:
        """Bytes of a number of a model's states."""
        return NUMBER[str(self.load(role).dtype)]

    def sizes(self, role: Role) -> ModelSizes:
        """The sizes of a model, if they are known."""
        found = self.target if role == "target" else self.draft
        assert found is not None
        return found

    def weights(self, role: Role) -> float:
        """Weights of a model that only reads them; of the draft as it is used."""
        processes = self.shards.processes
        return weights_bytes(self.sizes(role), self.load(role), self.here, processes)

    def copies(self, *roles: Role) -> float:
        """Copies for oneDNN of models that only read their weights."""
        return sum(copy_bytes(self.sizes(role), self.load(role), self.here) for role in roles)

    @property
    def length(self) -> int:
        """Tokens of a long rollout."""
        return self.prompt + self.config.rollouts.max_new_tokens


def memory_of(stage: str, config: PipelineConfig) -> Memory | None:
    """The memory of one stage at its peak, in each process; None if sizes are not known here."""
    return stage_memory(stage, Setting.of(config))


def stage_memory(stage: str, setting: Setting) -> Memory | None:
    """As `memory_of`, of what is known already."""
    if stage not in PARTS or unknown_models(stage, setting):
        return None
    return Memory({name: size for name, size in PARTS[stage](setting).items() if size})


def models_of(stage: str, config: PipelineConfig) -> list[Role]:
    """The models whose sizes a stage's memory depends on."""
    if stage == "rollouts":
        return ["target"] if config.rollouts.backend == "transformers" else []
    if stage == "logits":
        served = config.logits is not None and config.logits.backend != "transformers"
        return [] if served else ["target"]
    kept = {"labels": config.labels.cache, "draft": config.draft and config.draft.cache}
    alone = stage in ("finetuned", "head") or kept.get(stage)
    return ["draft"] if alone else ["target", "draft"]


def unknown_models(stage: str, setting: Setting) -> list[Role]:
    """Those of them whose sizes are not known here."""
    known = {"target": setting.target, "draft": setting.draft}
    return [role for role in models_of(stage, setting.config) if known[role] is None]


def _rollouts(setting: Setting) -> dict[str, float]:
    """The cache has room for half as much again (`GrowingLayer`), and what is read before it."""
    target = setting.sizes("target")
    wanted, number, here = setting.config.rollouts, setting.number("target"), setting.here
    if wanted.backend != "transformers":
        return {}
    rows = min(wanted.batch_size, wanted.shard_size * wanted.samples)
    at_once = min(rows * setting.prompt, max(TOKENS_AT_ONCE[here.kind], setting.prompt))
    room = int(GROWTH * setting.prompt) + 1
    while room < setting.length:
        room = int(GROWTH * (room + 1)) + 1
    # While prompts are joined, their parts are there beside the whole.
    room = max(room, round(2 * GROWTH * setting.prompt) if rows * setting.prompt > at_once else 0)
    logits = rows * target.logits * number
    if here.kind == "cuda":  # a CPU takes few rows at a time
        logits += rows * target.logits * (2 * FLOAT32 + DOUBLE)
    return {
        "target": setting.weights("target"),
        "copy for oneDNN": setting.copies("target"),
        "keys and values": cache_bytes(target, rows, room, number),
        "activations": read_bytes(target, max(at_once, rows), number),
        "logits": float(logits),
    }


def _labels(setting: Setting) -> dict[str, float]:
    """Both models read a batch; distributions are made for a few positions at a time."""
    return _read(setting, models_of("labels", setting.config))


def _logits(setting: Setting) -> dict[str, float]:
    """As labels, of the target alone."""
    roles = models_of("logits", setting.config)
    return _read(setting, roles) if roles else {}


def _read(setting: Setting, roles: Sequence[Role]) -> dict[str, float]:
    here = setting.here
    tokens = max(TOKENS_AT_ONCE[here.kind], setting.length)
    sizes = {role: setting.sizes(role) for role in roles}
    vocabulary = max(each.vocabulary for each in sizes.values())
    positions = max(LABEL_POSITIONS[here.kind], LABEL_VALUES // vocabulary)
    return {
        **{role: setting.weights(role) for role in roles},
        "copies for oneDNN": setting.copies(*roles),
        "activations": max(read_bytes(sizes[role], tokens, setting.number(role)) for role in roles)
        + sum(float(tokens * sizes[role].width * setting.number(role)) for role in roles),
        "logits": float(positions * vocabulary * LABEL_ENTRY),
    }


def _draft(setting: Setting) -> dict[str, float]:
    """The frozen target, the draft in training, and a plain copy that is measured and saved."""
    config = setting.config.draft
    assert config is not None
    draft = setting.sizes("draft")
    target = None if config.cache else setting.sizes("target")
    here = setting.here
    rows = math.ceil(config.batch_size / setting.shards.processes)
    length = min(setting.length, config.max_length or setting.length)
    completion = min(setting.config.rollouts.max_new_tokens, length)
    tokens, positions = rows * length, rows * completion
    entries = positions * draft.logits * ENTRY_BYTES
    # Training and measuring take turns.
    chunk = min(CHUNK_BYTES, entries)
    measured = min(WATCH_VALUES, positions * (target or draft).vocabulary) * LABEL_ENTRY
    output = 0 if config.lora else FLOAT32 * draft.width * draft.logits
    backward = activation_bytes(
        draft,
        tokens,
        in_bfloat16=config.precision == "bfloat16",
        checkpointed=config.gradient_checkpointing,
    )
    read = 0.0
    if target:
        once = max(tokens, TOKENS_AT_ONCE[here.kind])
        read = read_bytes(target, once, setting.number("target"))
    return {
        "target": _teacher(setting) if target else 0.0,
        **_trained(setting, draft),
        "a copy of the draft": float(FLOAT32 * draft.parameters),
        "activations": max(backward, read),
        "logits": float(max(chunk + output, measured)),
        "the target's states": _kept_states(setting, target) if target else 0.0,
    }


def _teacher(setting: Setting) -> float:
    """The frozen target beside the draft that learns from it: whole, or a part in each process.

    In parts its layers are divided, and gathered two at a time; embeddings stay whole once they
    have been used (`specdata.sharded`).
    """
    draft, target = setting.config.draft, setting.sizes("target")
    whole, processes = setting.weights("target"), setting.shards.processes
    if draft is None or not draft.shard_teacher or processes == 1:
        return whole
    layers = float(target.matrices * setting.number("target"))
    return whole - layers + layers / processes + 2 * layers / target.layers


def _trained(setting: Setting, draft: ModelSizes) -> dict[str, float]:
    """The draft in training: all of its weights, or adapters."""
    config = setting.config.draft
    assert config is not None
    whole, optimizer = float(draft.parameters), config.optimizer
    trained, matrices = whole, float(draft.matrices)
    if config.freeze_embeddings:
        trained -= draft.width * draft.vocabulary
    if lora := config.lora:
        # B A beside each (out, in) matrix of a layer: rank x (out + in).
        attention = 4 * draft.width + 2 * draft.queries + 2 * draft.keys
        mlp = (2 + draft.is_gated) * (draft.width + draft.inner)
        trained = matrices = float(draft.layers * lora.rank * (attention + mlp))
        packed = PACKED[lora.bits] if lora.bits else FLOAT32
        whole = trained + (draft.matrices * packed / FLOAT32) + draft.embeddings
    parts = training_parts(whole, trained, matrices, optimizer, setting.shards, setting.here)
    return {**parts, "gathered weights": _gathered(draft, setting)}


def _gathered(draft: ModelSizes, setting: Setting) -> float:
    """Weights that are divided, where they are together for a while.

    In a step: with DeepSpeed as many as it keeps at most, with FSDP2 two layers and the embeddings.
    To be measured and saved: all, in the memory of the CPU.
    """
    shards = setting.shards
    if shards.stage < 3 or shards.processes == 1:
        return 0.0
    fsdp = 2 * draft.matrices / draft.layers + draft.embeddings
    together = min(LIVE, draft.parameters) if shards.is_deepspeed else fsdp
    return float(FLOAT32 * (together + (draft.parameters if setting.here.kind == "cpu" else 0)))


def _kept_states(setting: Setting, target: ModelSizes) -> float:
    """States of the target along the rollouts, which the teacher and the measurements keep."""
    config = setting.config
    assert config.draft is not None
    size = config.rollouts.max_new_tokens * config.rollouts.samples
    size *= target.width * setting.number("target")
    kept = 0.0
    for split in ("train", "dev"):
        sets = [each for each in config.rollouts.sets if each.split == split]
        counted = all(each.count for each in sets)
        states = float(size * sum(each.count for each in sets)) if counted else math.inf
        if split == "dev" or config.draft.epochs > setting.shards.processes:
            kept += min(KEPT_BYTES, states)
    return kept


def _finetuned(setting: Setting) -> dict[str, float]:
    """Rows of texts: their logits, shifted and in float32, and the loss's gradient."""
    draft = setting.sizes("draft")
    config = setting.config.draft
    assert config is not None
    assert config.finetune is not None
    tuning = config.finetune
    tokens = math.ceil(tuning.batch_size / setting.shards.processes) * tuning.max_length
    return {
        **_trained(setting, draft),
        "a copy of the draft": float(FLOAT32 * draft.parameters),
        "activations": activation_bytes(draft, tokens),
        "logits": float(3 * FLOAT32 * tokens * draft.vocabulary),
    }


def _head(setting: Setting) -> dict[str, float]:
    """The frozen draft reads micro-batches; the head has four numbers a weight."""
    draft = setting.sizes("draft")
    config = setting.config.head
    assert config is not None
    number, here = setting.number("draft"), setting.here
    rows = config.micro_batch_size
    length = min(setting.length, config.max_length or setting.length)
    positions = rows * min(setting.config.rollouts.max_new_tokens, length)
    # Drafted tokens are read beside the text, under a mask of their own.
    more = config.draws if config.mixing is None and "consumed" in config.moments else 0
    beside = positions * more if config.kind == "immediate" else 0
    side = length + beside // rows
    mask = rows * side * side * (number + 1) if beside else 0
    values = min(HEAD_VALUES, positions * draft.vocabulary * max(1, config.draws))
    head = head_bytes(setting.config) or 0
    inner = 4 * config.width if config.kind == "immediate" else 2 * draft.width
    hidden = positions * len(config.moments) * FLOAT32 * (config.depth * inner + 3 * draft.width)
    shards = setting.shards
    trained = training_parts(head / 4, head / 4, 0.0, "adamw", shards, here)
    return {
        "draft": setting.weights("draft"),
        "head in training": sum(trained.values()),
        "activations": read_bytes(draft, rows * length + beside, number) + mask + hidden,
        "logits": float(values * HEAD_ENTRY),
    }


def _eval(setting: Setting) -> dict[str, float]:
    """Both models decode; their caches have a multiple of `CAPACITY_STEP` places."""
    target, draft = setting.sizes("target"), setting.sizes("draft")
    config = setting.config
    prompt = prompt_tokens(config.eval.sets, config.seed)
    tokens = prompt + config.eval.max_new_tokens
    places = -(-tokens // CAPACITY_STEP) * CAPACITY_STEP
    rows, drafts = config.eval.batch, 1 + len(path_drafts(config.eval))
    # The head is judged afterwards, on a draft of its own.
    judged = 1 if config.head else 0
    read = TOKENS_AT_ONCE[setting.here.kind] if judged else prompt
    is_captured = config.eval.engine != "eager"
    # Trees are searched, and a head is judged, on held-out rollouts, a few positions at a time.
    searched = TREE_VALUES * TREE_ENTRY if any(map(_draws_a_tree, config.eval.methods)) else 0
    logits = rows * DRAFTED * target.vocabulary * LABEL_ENTRY
    return {
        "target": setting.weights("target"),
        "drafts": (drafts + judged) * setting.weights("draft"),
        "copies for oneDNN": setting.copies("target", "draft") if is_captured else 0.0,
        "keys and values": cache_bytes(target, rows, places, setting.number("target"))
        + drafts * cache_bytes(draft, rows, places, setting.number("draft")),
        "activations": max(
            read_bytes(target, max(prompt, rows * DRAFTED), setting.number("target")),
            read_bytes(draft, max(read, prompt), setting.number("draft")),
        ),
        "logits": float(max(logits, searched)),
    }


def _draws_a_tree(method: MethodConfig) -> bool:
    return method.drafter == "tree"


PARTS: dict[str, Callable[[Setting], dict[str, float]]] = {
    "rollouts": _rollouts,
    "logits": _logits,
    "finetuned": _finetuned,
    "draft": _draft,
    "labels": _labels,
    "head": _head,
    "eval": _eval,
}
"""Stage -> what it holds at its peak, in bytes."""
