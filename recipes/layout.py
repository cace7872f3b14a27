"""Where each stage of a run lives, and what it depends on: the one description that all share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distill.config import ARCHITECTURES, TOY_POSITIONS
from eval.measuring.methods import method_defaults, needs_fit, path_drafts, rewritten
from heads.config import as_stored_today
from recipes.config import PipelineConfig
from recipes.model_sizes import ModelSizes
from recipes.run import Stage, absolute, is_within
from recipes.units import in_bytes
from specdata.adapter_folder import base_of_adapters
from specdata.errors import ConfigError
from specdata.gguf_file import describe_gguf, is_gguf
from specdata.hub import hub_source
from specdata.loading import Role
from specdata.prompts.conversations import conversation_inputs
from specdata.prompts.reading import prompt_inputs, source_of
from specdata.storage.resume import Settings, defaults_of

# Folders of a run's output; what a stage makes is read by later ones only.
ORDER = (
    "pair",
    "rollouts",
    "logits",
    "initial",
    "finetuned",
    "draft",
    "labels",
    "head",
    "eval",
    "release",
)
# A model's weights, or adapters', as transformers and PEFT save them.
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
# Version of what release folders hold: raise it when cards or files change, so that finished runs
# make theirs again. Runs that stored none are older than it.
RELEASE_FORMAT = 4
# Bytes a stored token takes at most, measured on the demo: an id; an id, a drafted id and eight
# numbers; an id and a number for each further draw or kept logit. A prompt's own ids come on top.
ROLLOUT_TOKEN, LABEL_TOKEN, PAIR = 4, 40, 8
# Three numbers beside the kept logits.
LOGITS_TOKEN = 12
# results.json and what it is made of, a generation; the report with its plots.
GENERATION, REPORT = 2500, 2_800_000
# Features of heads that are as wide as the draft; the others are numbers.
VECTORS = ("hidden_before", "embedding", "hidden")


def folder(config: PipelineConfig, stage: str) -> Path:
    """output/STAGE."""
    return Path(config.output) / stage


def eval_folder(config: PipelineConfig) -> Path:
    """Where this evaluation is: output/eval, unless eval.folder says otherwise."""
    return folder(config, config.eval.folder)


def is_cut(config: PipelineConfig) -> bool:
    """Whether this run makes the draft that its training starts from (`draft.init`)."""
    made = config.draft and (config.draft.init.kind != "model" or config.draft.init.vocabulary)
    return bool(made)


def initial_draft(config: PipelineConfig) -> str:
    """The draft before it is trained: made by this run, or given."""
    if is_cut(config):
        return str(folder(config, "initial") / "model")
    assert config.models.draft is not None  # the configuration's own check
    return config.models.draft


def draft_to_distil(config: PipelineConfig) -> str:
    """The draft that distillation starts from: fine-tuned by this run, or as it was."""
    if config.draft and config.draft.finetune:
        return str(folder(config, "finetuned") / "model")
    return initial_draft(config)


def draft_in_use(config: PipelineConfig) -> str:
    """The distilled draft, or the given one if this run distils none."""
    return str(folder(config, "draft") / "model") if config.draft else initial_draft(config)


def head_in_use(config: PipelineConfig) -> str | None:
    """The trained head, if this run trains one."""
    return str(folder(config, "head") / "model") if config.head else None


def pair_stage(config: PipelineConfig) -> Stage:
    """Train the embedded pair. Raises ConfigError if `models` points elsewhere."""
    assert config.toy is not None
    here = folder(config, "pair")
    for name, path in (("target", config.models.target), ("draft", config.models.draft)):
        if path is None or absolute(path) != absolute(here / name):
            raise ConfigError(
                f"with a toy section, models.{name} must be {here / name}, got {path}: change it, "
                "or set toy to null and use your own pair"
            )
    toy = config.toy
    weights = _toy_bytes(toy.vocab_size, toy.target_layers, toy.target_width)
    weights += _toy_bytes(toy.vocab_size, toy.draft_layers, toy.draft_width)
    size = f"target and draft, {_bytes(weights)} of weights"
    values = {"toy": toy.model_dump(mode="json"), "seed": config.seed}
    return _stage(config, "pair", values, {}, size)


def rollouts_stage(config: PipelineConfig) -> Stage:
    """Complete the prompts with the target."""
    values = {"rollouts": config.rollouts.decisive(), **_sampled(config, "target")}
    inputs = {"target": config.models.target, **prompt_inputs(config.rollouts.sets)}
    size = _rows_size(config, lambda _split: ROLLOUT_TOKEN + _state_bytes(config))
    return _stage(config, "rollouts", values, inputs, size)


def logits_stage(config: PipelineConfig) -> Stage:
    """Keep the target's largest logits along the rollouts."""
    assert config.logits is not None
    values = {"logits": config.logits.decisive(), "dtype": config.models.dtype}
    values |= _loaded(config, "target")
    inputs = {"target": config.models.target, "rollouts": str(folder(config, "rollouts"))}
    token = ROLLOUT_TOKEN + PAIR * config.logits.top_logits + LOGITS_TOKEN
    return _stage(config, "logits", values, inputs, _rows_size(config, lambda _split: token))


def initial_stage(config: PipelineConfig) -> Stage:
    """Make the draft that training starts from."""
    assert config.draft is not None
    values: dict[str, Any] = {"init": config.draft.init.model_dump(mode="json")}
    values |= _sampled(config, "target")
    values["sets"] = config.draft.sets
    values |= _spared(config)
    inputs = {"target": config.models.target, "rollouts": str(folder(config, "rollouts"))}
    if config.draft.init.kind == "model":
        assert config.models.draft is not None  # the configuration's own check
        inputs["draft"] = config.models.draft
    return _stage(config, "initial", values, inputs, f"the draft, {_draft_size(config)}")


def finetuned_stage(config: PipelineConfig) -> Stage:
    """Train the draft on texts."""
    assert config.draft is not None
    assert config.draft.finetune is not None
    tuning = config.draft.finetune
    lora = config.draft.lora.model_dump(mode="json") if config.draft.lora else None
    values: dict[str, Any] = {"finetune": tuning.model_dump(mode="json"), "lora": lora}
    values["seed"] = config.seed
    inputs = {"target": config.models.target, "draft": initial_draft(config)}
    if tuning.conversations:
        inputs |= conversation_inputs(tuning.conversations)
    else:
        values["sets"] = config.draft.sets
        values |= _spared(config)
        inputs["rollouts"] = str(folder(config, "rollouts"))
    return _stage(config, "finetuned", values, inputs, f"the draft, {_draft_size(config)}")


def draft_stages(config: PipelineConfig) -> list[Stage]:
    """Everything that makes the draft, in order."""
    if config.draft is None:
        return []
    stages = [initial_stage(config)] if is_cut(config) else []
    stages += [finetuned_stage(config)] if config.draft.finetune else []
    return [*stages, draft_stage(config)]


def draft_stage(config: PipelineConfig) -> Stage:
    """Distil the draft on the rollouts."""
    assert config.draft is not None
    values = {"draft": config.draft.decisive(), **_sampled(config, "target")}
    inputs = {
        "target": config.models.target,
        "draft": draft_to_distil(config),
        "rollouts": str(folder(config, "rollouts")),
    }
    if config.draft.cache:
        inputs["cache"] = config.draft.cache
    return _stage(config, "draft", values, inputs, f"the draft, {_draft_size(config)}")


def spared(config: PipelineConfig) -> float:
    """Share of the training rollouts that the draft does not learn from."""
    return config.draft.spared if config.draft else 0.0


def _spared(config: PipelineConfig) -> dict[str, Any]:
    """The same as a setting of a stage; nothing where it is 0, as in runs that did not know it."""
    return {"spared": share} if (share := spared(config)) else {}


def labels_stage(config: PipelineConfig) -> Stage:
    """Label the rollouts with the draft in use."""
    values = {
        "labels": config.labels.model_dump(mode="json"),
        **_sampled(config, "target", "draft"),
    }
    values |= _spared(config)
    inputs = {
        "target": config.models.target,
        "draft": draft_in_use(config),
        "rollouts": str(folder(config, "rollouts")),
    }
    if config.labels.cache:
        inputs["cache"] = config.labels.cache
    size = _rows_size(config, lambda split: label_bytes(config, split))
    return _stage(config, "labels", values, inputs, size)


def label_bytes(config: PipelineConfig, split: str) -> int:
    """Bytes that the labels of one completion token take at most, in rows of a split."""
    several = split == "train" and config.sampling.temperature > 0
    draws = config.labels.draws - 1 if several else 0
    return LABEL_TOKEN + PAIR * (draws + config.labels.top_logits)


def head_stage(config: PipelineConfig) -> Stage:
    """Train the acceptance head on the labels."""
    assert config.head is not None
    head = config.head
    values = {"head": head.decisive(), "seed": config.seed, "dtype": config.models.dtype}
    values |= _spared(config) | _loaded(config, "draft")
    inputs = {"draft": draft_in_use(config), "labels": str(folder(config, "labels"))}
    size = f"the head, {_head_size(config)}"
    if head.cache == "disk":
        size += f"; until it is done, what the draft says of the training rollouts, {_kept(config)}"
    stage = _stage(config, "head", values, inputs, size)

    def as_today(values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**values, "head": as_stored_today(values.get("head", {}), head)}

    return replace(stage, settings=replace(stage.settings, rewrite=as_today))


def eval_stage(config: PipelineConfig) -> Stage:
    """Measure every method."""
    # By name, so that a refusal lists the methods that differ.
    methods = {method.name: method.model_dump(mode="json") for method in config.eval.methods}
    values = {
        "eval": {**config.eval.model_dump(mode="json"), "methods": methods},
        **_sampled(config, "target", "draft"),
    }
    inputs = {"target": config.models.target, "draft": draft_in_use(config)}
    inputs |= {f"path draft {name}": name for name in path_drafts(config.eval)}
    inputs |= prompt_inputs(config.eval.sets)
    if head := head_in_use(config):
        inputs["head"] = head
        if needs_fit(config.eval):
            inputs["labels"] = str(folder(config, "labels"))
    here = eval_folder(config)
    return Stage(
        "eval",
        here,
        Settings(
            values,
            defaults_of(PipelineConfig) | method_defaults("eval.methods"),
            "choose another folder for another list of methods with --eval.folder NAME, or remove "
            f"{here} to measure again",
            rewritten,
        ),
        inputs,
        _eval_size(config),
    )


def is_made_here(config: PipelineConfig, model: str) -> bool:
    """Whether a model is of the embedded pair, which this run trains."""
    return config.toy is not None and is_within(model, str(folder(config, "pair")))


def is_without_weights(source: str) -> bool:
    """Whether a folder describes a model and does not hold it."""
    here = Path(source)
    return (here / "config.json").is_file() and not any(any(here.glob(each)) for each in WEIGHTS)


def release_stage(config: PipelineConfig) -> Stage:
    """Assemble what would be published."""
    inputs = {
        "draft": draft_in_use(config),
        "results": str(eval_folder(config) / "results.json"),
    }
    parts = []
    if config.draft:
        parts.append(f"a copy of the draft, {_draft_size(config)}")
    if head := head_in_use(config):
        inputs["head"] = head
        parts.append(f"a copy of the head, {_head_size(config)}")
    size = "; ".join([*parts, "with model cards"]) if parts else "nothing: nothing is trained"
    values = {"publish": config.publish.model_dump(mode="json"), "format": RELEASE_FORMAT}
    return _stage(config, "release", values, inputs, size, "the copies are made again")


def all_stages(config: PipelineConfig) -> list[Stage]:
    """Every stage of a run, in order."""
    stages = [pair_stage(config)] if config.toy else []
    stages += [rollouts_stage(config)] if config.toy or config.draft or config.head else []
    stages += [logits_stage(config)] if config.logits else []
    stages += draft_stages(config)
    stages += [labels_stage(config), head_stage(config)] if config.head else []
    return [*stages, eval_stage(config), release_stage(config)]


def by_content(settings: Settings) -> Settings:
    """The settings of a dataset, compared by what its models hold and not by where they are."""
    return replace(settings, rewrite=without_names)


def without_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a dataset with the contents of its models, but not their folders' names."""
    models = {
        role: {key: value for key, value in values[role].items() if key != "name"}
        for role in ("target", "draft")
        if isinstance(values.get(role), Mapping) and "revision" in values[role]
    }
    return {**values, **models}


def _stage(
    config: PipelineConfig,
    name: str,
    values: Mapping[str, Any],
    inputs: Mapping[str, str],
    size: str,
    remedy: str | None = None,
) -> Stage:
    """A stage in its own folder of the run's output."""
    here = folder(config, name)
    remedy = remedy or _remedy(config, name)
    return Stage(name, here, Settings(values, defaults_of(PipelineConfig), remedy), inputs, size)


def _remedy(config: PipelineConfig, name: str) -> str:
    """What to do about a stage's folder that was made with other settings."""
    elsewhere = "choose another --output"
    if config.toy:  # whose models must lie in the output
        elsewhere += " NEW, with --models.target NEW/pair/target and --models.draft NEW/pair/draft"
    later = ORDER[ORDER.index(name) + 1 :]
    # Of evaluations there may be several: eval.folder begins with "eval".
    made = [
        here
        for stage in later
        for here in sorted(Path(config.output).glob("eval*" if stage == "eval" else stage))
    ]
    return f"{elsewhere}, or remove {', '.join(map(str, [folder(config, name), *made]))}"


def _sampled(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """What decides the result of every stage that runs the models of these roles."""
    return {
        "sampling": asdict(config.sampling),
        "seed": config.seed,
        "dtype": config.models.dtype,
        **_loaded(config, *roles),
    }


def _loaded(config: PipelineConfig, *roles: Role) -> dict[str, Any]:
    """What else of the loading of models decides a result; nothing where models.dtype says all."""
    usual = {"dtype": config.models.dtype}
    decisive = {role: config.models.loading(role).decisive() for role in roles}
    other = {
        role: {key: value for key, value in values.items() if usual.get(key) != value}
        for role, values in decisive.items()
        if values != usual
    }
    return {"load": other} if other else {}


def _rows_size(config: PipelineConfig, token_bytes: Callable[[str], int]) -> str:
    """How much is stored of rollouts, or of labels, which have as many rows.

    `token_bytes` gives the bytes of a completion token in rows of a split.
    """
    rollouts = config.rollouts
    most = rollouts.samples * rollouts.max_new_tokens  # tokens of a prompt's completions
    if not all(wanted.count for wanted in rollouts.sets):
        largest = max(token_bytes(wanted.split) for wanted in rollouts.sets)
        return f"at most {most:,} tokens a prompt, {_bytes(most * largest)}"
    prompts = sum(wanted.count for wanted in rollouts.sets)
    stored = most * sum(wanted.count * token_bytes(wanted.split) for wanted in rollouts.sets)
    # Only conversations have later turns, and embedded sets hold none.
    more = " (more with later turns)" if any(map(source_of, rollouts.sets)) else ""
    return (
        f"{rollouts.samples * prompts:,} completions{more}, at most {most * prompts:,} tokens, "
        f"{_bytes(stored)}"
    )


def _state_bytes(config: PipelineConfig) -> int:
    """Bytes of a token's state that rollouts store; 0 where they store none, or it is unknown."""
    if not config.rollouts.keep_states:
        return 0
    known = sizes_of(config, config.models.target)
    width = next((known[name] for name in ("hidden_size", "n_embd") if name in known), 0)
    return int(width) * (4 if config.models.dtype_of("target") == "float32" else 2)


def _eval_size(config: PipelineConfig) -> str:
    sets, methods = config.eval.sets, len(config.eval.methods)
    if not all(wanted.count for wanted in sets):
        return f"results, samples, report.html and plots, {_bytes(methods * GENERATION)} a prompt"
    prompts = sum(wanted.count for wanted in sets)
    generations = prompts * methods
    return (
        f"results, samples, report.html and plots: {prompts:,} prompts x {methods} methods = "
        f"{generations:,} generations of at most {config.eval.max_new_tokens} tokens, "
        f"{_bytes(generations * GENERATION + REPORT)}"
    )


def _draft_size(config: PipelineConfig) -> str:
    """The size of the draft's weights, if it is on this machine or will be made here."""
    if is_cut(config):
        made = _initial_bytes(config)
        return "its size follows from draft.init" if made is None else _bytes(made)
    if toy := config.toy:
        return _bytes(_toy_bytes(toy.vocab_size, toy.draft_layers, toy.draft_width))
    assert config.models.draft is not None  # the configuration's own check
    model = base_of_adapters(config.models.draft) or config.models.draft
    here = on_this_machine(model)
    weights = [path.stat().st_size for path in here.glob("*.safetensors")] if here else []
    return _bytes(sum(weights)) if weights else f"as large as {model}"


def _initial_bytes(config: PipelineConfig) -> int | None:
    """Float32 weights of the draft that `draft.init` makes, in bytes; None if that is not known."""
    known, kept = initial_sizes(config)
    # Of architectures with other layers than Llama's, biases would be missing.
    sizes = ModelSizes.of(known, kept) if "rms_norm_eps" in known else None
    return None if sizes is None else 4 * sizes.parameters


def initial_sizes(config: PipelineConfig) -> tuple[Mapping[str, Any], int | None]:
    """What config.json of the draft that training starts from says, as far as it is known.

    Returns:
        That, and the rows of the output matrix, if `draft.init` reduces the vocabulary.
    """
    sizes = dict(sizes_of(config, source_model(config)))
    if config.draft is None:
        return sizes, None
    init = config.draft.init
    if init.kind == "fresh":
        tied = init.architecture == "toy"
        target = sizes_of(config, config.models.target)
        sizes = {"vocab_size": target.get("vocab_size"), "rms_norm_eps": 0.0}
        sizes |= {"tie_word_embeddings": tied, **asdict(ARCHITECTURES[init.architecture])}
    elif init.kind == "target":
        count = init.layers if isinstance(init.layers, int) else len(init.layers)
        sizes["num_hidden_layers"] = count
        if init.align:
            sizes["tie_word_embeddings"] = False
    return sizes, init.vocabulary


def _head_size(config: PipelineConfig) -> str:
    """The size of the head's weights, if the draft's hidden size is known on this machine."""
    assert config.head is not None
    weights = head_bytes(config)
    if weights is None:
        return f"depth {config.head.depth}; its width is that of {source_model(config)}"
    return _bytes(weights)


def head_bytes(config: PipelineConfig) -> int | None:
    """Float32 weights of the head, in bytes; None if the draft's hidden size is not known."""
    assert config.head is not None
    width, head = draft_width(config), config.head
    if width is None:
        return None
    if head.kind == "specdec++":
        return 4 * (head.depth * (width * width + width) + width + 1)
    vectors = sum(name in VECTORS for name in head.features)
    numbers = len(head.features) - vectors
    # Each vector has a norm's two rows and a matrix, each number and each of three moments a row. A
    # block is a norm and two matrices with biases, of twice the width inside; then norm and output.
    weights = vectors * width * (head.width + 2) + (numbers + 3) * head.width
    weights += head.depth * head.width * (4 * head.width + 4) + 2 * head.width + 1
    return 4 * weights


def source_model(config: PipelineConfig) -> str:
    """The model that the draft has its hidden size from, if it is not a fresh one."""
    kind = config.draft.init.kind if config.draft else "model"
    if kind == "target" or config.models.draft is None:
        return config.models.target
    return config.models.draft


def draft_width(config: PipelineConfig) -> int | None:
    """The draft's hidden size, if it is known on this machine."""
    if config.draft and config.draft.init.kind == "fresh":
        return ARCHITECTURES[config.draft.init.architecture].hidden_size
    known = sizes_of(config, source_model(config))
    return next((known[name] for name in ("hidden_size", "n_embd") if name in known), None)


def _kept(config: PipelineConfig) -> str:
    """How much at most a head's training keeps of the draft: its states, in bfloat16."""
    assert config.head is not None
    width = draft_width(config)
    rollouts = [wanted for wanted in config.rollouts.sets if wanted.split == "train"]
    if width is None or not all(wanted.count for wanted in rollouts):
        return "two bytes for each label, moment and unit of the draft's hidden size"
    labels = sum(wanted.count or 0 for wanted in rollouts) * config.rollouts.samples
    labels *= config.rollouts.max_new_tokens
    states = 1 + config.labels.draws * ("consumed" in config.head.moments)
    return _bytes(2 * labels * states * width)


def sizes_of(config: PipelineConfig, model: str) -> Mapping[str, Any]:
    """What a model's config.json says, or will say if this run trains it; empty if unknown."""
    if config.toy is None or not is_made_here(config, model):
        return described(model)
    is_target = absolute(model) == absolute(config.models.target)
    toy = config.toy
    width = toy.target_width if is_target else toy.draft_width
    return {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 16 * 16,
        "num_attention_heads": 1,  # of the whole width: the sizes are those of several
        "num_hidden_layers": toy.target_layers if is_target else toy.draft_layers,
        "vocab_size": toy.vocab_size,
        "max_position_embeddings": TOY_POSITIONS,
        "tie_word_embeddings": True,
        "rms_norm_eps": 0.0,
    }


def described(model: str) -> Mapping[str, Any]:
    """What a model's config.json says of the language model; empty if it is not on this machine.

    Raises:
        ConfigError: if it is a GGUF file that cannot be read.
    """
    if base := base_of_adapters(model):
        return described(base)
    if is_gguf(model):
        return describe_gguf(model)
    here = on_this_machine(model)
    try:
        known = json.loads((here / "config.json").read_text("utf-8")) if here else {}
    except (OSError, ValueError):
        return {}
    known = known.get("text_config", known) if isinstance(known, dict) else {}
    return known if isinstance(known, dict) else {}


def on_this_machine(model: str) -> Path | None:
    """The folder of a model: its own, or the one that the Hub's cache keeps of it."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache  # here: few plans need it

    source, revision = hub_source(model)
    try:
        path = try_to_load_from_cache(source, "config.json", revision=revision or "main")
    except ValueError:  # no Hub id
        return None
    return Path(path).parent if isinstance(path, str) else None


def _toy_bytes(vocabulary: int, layers: int, width: int) -> int:
    """Float32 weights of a model of the embedded pair (`distill.toy.language_model`), in bytes."""
    inner = width * 8 // 3 // 16 * 16
    layer = 4 * width * width + 3 * width * inner + 2 * width
    return 4 * (vocabulary * width + layers * layer + width)


def _bytes(count: int) -> str:
    return f"about {in_bytes(count)}" if count >= 1000 else in_bytes(count)
