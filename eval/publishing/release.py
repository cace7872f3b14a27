"""Folders that can be published as they are: a draft, a head, each with a card made of results.

Every number in a card comes out of results.json, whose figures are recomputed from their raw
counts first. Nothing leaves this machine unless a repository is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import EvalResult, HfApi, errors
from huggingface_hub.constants import CONFIG_NAME
from torch import Tensor

from eval.decode_config import Method
from eval.measuring.lengths import fixed_lengths
from eval.measuring.pooled import PooledRow, medians, merit, pool
from eval.measuring.results import Results, Run, check_metrics, write_results
from eval.publishing.metadata import ELSEWHERE, About, check_repository, loadable, metadata
from eval.publishing.serving import served_lengths, serving_lines
from eval.reporting import verifiers
from eval.reporting.rendering import public_name, render
from eval.reporting.report import acceptance_by_position
from eval.reporting.table import described, readme_table, shown_methods
from eval.reporting.verdict import verdict
from heads import BaseHead
from heads.config import HEAD_KINDS
from heads.published import write_custom_generate
from specdata.drafts import kind_of
from specdata.drafts.draft_vocabulary import (
    SIZE,
    draft_vocabulary_ids,
    is_reduced,
    restore_vocabulary,
    substitute_row,
)
from specdata.drafts.kind import KEY
from specdata.drafts.masks import DEPTHS
from specdata.drafts.mtp import MTP, fed_by
from specdata.drafts.states_network import TargetStates, reads_states
from specdata.errors import ManifestError
from specdata.lm_head import capturing_hidden
from specdata.models import (
    check_shared_vocabulary,
    from_hub,
    load_configs,
    load_tokenizer,
    positions,
    read_model,
)
from specdata.probability import SamplingConfig, draw, probabilities
from specdata.sampling import UNAPPLIED, unapplied, unapplied_words
from specdata.saving import add_former_names, copy_tokenizer
from specdata.storage.files import atomic_folder, write_json, write_text

CARD = "README.md"
UPLOAD = "upload.json"
"""The record of an upload: here alone, beside what was uploaded."""
REDUCED = "reduced"
"""The folder, in that of a draft with a reduced vocabulary, that holds what was measured."""
# Texts of so many tokens that a reduced draft writes itself, to find what stands for the tokens
# that it left out.
OWN_TEXTS, OWN_LENGTH = 64, 32


@dataclass(frozen=True, slots=True)
class ForEngines:
    """A draft in a layout that engines hold.

    Attributes:
        layout: one of its kind's (`DraftKind.layouts`).
        write: writes its config.json, weights and tokenizer into a folder.
        is_asked: whether an acceptance head is in its slot.
    """

    layout: str
    write: Callable[[Path], None]
    is_asked: bool = False


def release_draft(
    source: Path,
    out: Path,
    results: Results,
    about: About | None = None,
    *,
    engines: ForEngines | None = None,
    push_to: str | None = None,
    private: bool = True,
) -> Path:
    """Assemble a draft for the Hub: weights, target's tokenizer, generation settings, code, card.

    The settings make transformers draft as many tokens a round as were measured to be best in its
    own loop; where that was not measured they leave it to transformers. A draft on its target's
    states, which transformers refuses, comes without code: as `engines` load it, or else as it was
    measured, and then it names its target. The folder appears when all of it, the upload included,
    is done; nothing is uploaded unless `push_to` names a repository, which is made private unless
    told otherwise.
    """
    about, name = about or About(), push_to or out.name
    check_repository(push_to)
    measured = _measured(results, source, "draft")
    target = measured.runs[0].target
    fixed, fastest = fixed_lengths(pool(measured)), fastest_lengths(measured)
    if not fixed:
        raise ManifestError(
            "the card of a draft needs a measured draft length: evaluate a method with a fixed"
            " length (stop: fixed) on every prompt set"
        )
    longest = max(fixed, key=lambda row: row.method.deepest)
    lengths = {engine: rows[0].method.deepest for engine, rows in fastest.items() if rows}
    tokenizer = load_tokenizer(target)
    check_shared_vocabulary(tokenizer, load_tokenizer(str(source)))
    model = _load_whole(source)
    if "transformers" in lengths:
        # What makes transformers draft exactly so many tokens a round.
        model.generation_config.update(
            num_assistant_tokens=lengths["transformers"],
            num_assistant_tokens_schedule="constant",
            # The lengths were measured without a second stop rule; the default is 0.4.
            assistant_confidence_threshold=0.0,
        )
    released = push_to or loadable(name)
    card = _of_draft(model.config, engines, released, loadable(target))
    kind, states = card["kind"], card["states"]
    assert (engines is None) == (not kind.layouts), "what engines hold is released in a layout"
    untagged = () if "llama.cpp" in card["serving"] else ("llama-cpp",)
    front = {
        "library": "draftsmith" if states else "transformers",
        "tags": ["draft-model", *(each for each in kind.served.tags if each not in untagged)],
        "relation": "finetune",
    }
    with _assembled(
        "draft_card.md.jinja",
        out,
        front,
        measured,
        about,
        verdict=verdict(results),  # over all, methods with other drafts too
        push_to=push_to,
        private=private,
        name=name,
        heading=f"{name} for {public_name(target)}",
        target=target,
        load={"own": released, "target": loadable(target)},
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        positions=positions(model.config.get_text_config()),
        target_vocabulary=load_configs(target)[0].get_text_config().vocab_size,
        longest=longest.method.deepest,
        lengths=lengths,
        acceptance=acceptance_by_position(measured),
        best=(fastest["draftsmith"] or [longest])[0].runs[0],
        **card,
    ) as folder:
        if engines:
            engines.write(folder)
        else:
            if states:
                getattr(model.config, KEY)["target"] = loadable(target)
            elif card["reduced"] is not None:
                _save(model, folder / REDUCED, target)
                _make_whole(model)
            _save(model, folder, target)
        if not states:
            write_custom_generate(folder)
    return out


def fastest_lengths(results: Results) -> dict[str, list[PooledRow]]:
    """Engine -> the fixed lengths that were measured with it, from the fastest; none without times.

    A length that is best in one engine's loop says nothing about another engine, whose draft and
    target cost other shares of a round.
    """
    fixed = fixed_lengths(pool(results)) if results.timed else []
    decoders = {"draftsmith": "speculative", "transformers": "assisted"}
    return {
        engine: [row for row in fixed if row.method.decoder == decoder]
        for engine, decoder in decoders.items()
    }


def _of_draft(config: Any, engines: ForEngines | None, name: str, target: str) -> dict[str, Any]:
    """The values of a card that follow from a draft's configuration, and how engines serve it."""
    kind, vocabulary = kind_of(config), config.get_text_config().vocab_size
    depths, reduced = kind.depths(vars(config)), getattr(config, SIZE, None)
    model_type = config.get_text_config().model_type
    asked = {"is_asked": engines is not None and engines.is_asked, "model_type": model_type}
    return {
        "kind": kind,
        "states": (states := TargetStates.of(config) if kind.reads_states else None),
        "convention": (convention := states.kind_record if states and kind is MTP else None),
        "fed_by": convention and fed_by(model_type, convention),
        "engines": engines,
        "depths": depths,
        "vocabulary": vocabulary,
        "reduced": None if reduced == vocabulary else reduced,  # of an engine's layout
        "serving": serving_lines(name, target, kind, depths, **asked),
        "served_lengths": served_lengths(kind, depths),
    }


def _save(model: Any, folder: Path, target: str) -> None:
    """Save a draft with its target's tokenizer."""
    model.save_pretrained(folder)
    add_former_names(folder)
    copy_tokenizer(target, folder)


def release_unmeasured(source: Path, out: Path, target: str, engines: ForEngines) -> None:
    """Assemble a draft for engines that no results measure; its card has no figures."""
    released, loaded = loadable(out.name), loadable(target)
    card = render(
        "unmeasured_card.md.jinja",
        name=out.name,
        target=public_name(target),
        local=[path for path in (released, loaded) if path.startswith(ELSEWHERE)],
        **_of_draft(load_configs(str(source))[0], engines, released, loaded),
    )
    with atomic_folder(out) as folder:
        engines.write(folder)
        write_text(folder / CARD, card)


def release_head(
    source: Path,
    out: Path,
    results: Results,
    about: About | None = None,
    *,
    trained: str = "",
    push_to: str | None = None,
    private: bool = True,
) -> Path:
    """Assemble an acceptance head for the Hub: weights, configuration, code, card.

    As `release_draft`; `trained` says in words on how many rollouts of what it was trained. A
    ValueError if `source` is no head.
    """
    about, name = about or About(), push_to or out.name
    check_repository(push_to)
    measured = _measured(results, source, "head")
    head = BaseHead.from_pretrained(source)
    used = head_run(measured)
    target, draft = used.target, about.base_model or str(used.draft)
    read = load_configs(str(used.draft))[0]
    states = reads_states(read)
    front = {
        "library": "draftsmith",
        "tags": ["acceptance-head", "arxiv:2405.19715"],
        "relation": "adapter",
    }
    with _assembled(
        "head_card.md.jinja",
        out,
        front,
        measured,
        about,
        verdict=verdict(results),
        push_to=push_to,
        private=private,
        name=name,
        heading=f"{name} for {public_name(draft)} with {public_name(target)}",
        target=target,
        draft=public_name(draft),
        load={
            "own": push_to or loadable(name),
            "target": loadable(target),
            "draft": loadable(draft),
        },
        head=head,
        title=HEAD_KINDS[head.kind].title,
        by_transformers=not states and getattr(used.method.stop, "cumulative", True),
        in_layout=bool(kind_of(read).layouts),
        convention=TargetStates.of(read).kind_record if kind_of(read) is MTP else None,
        depths=getattr(read, DEPTHS, 1),
        width=getattr(head, "width", None),
        reduced=not states and is_reduced(read),
        trained=trained,
        best=used,
    ) as folder:
        head.save_pretrained(folder)
        # The folder that the draft had here means nothing elsewhere.
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        write_json(folder / CONFIG_NAME, {**config, "draft": public_name(draft)})
        BaseHead.from_pretrained(folder)
    return out


def code_of(run: Run) -> dict[str, str]:
    """The arguments of `DecodeConfig` that decode as was measured, as code."""
    rule, default = run.method.stop, Method.model_construct()
    usual = default.model_dump() | type(rule)().model_dump()
    settings = {
        name: value
        for name, value in run.method.model_dump().items()
        if name in ("verifier", "stop", "length", "limit", "threshold")
        or (name not in ("name", "decoder") and value != usual[name])
    }
    warped = asdict(SamplingConfig())
    settings |= {name: run.sampling.get(name, value) for name, value in warped.items()}
    return {name: repr(value).replace("'", '"') for name, value in settings.items()}


def hub_results(results: Results, method: str) -> list[EvalResult]:
    """What the Hub shows of a model: a method's figures on each prompt set, as its model-index."""
    shown = {"speedup": "speed-up", "block_efficiency": "tokens per target call"}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=rate,
            metric_name=f"{words} of {method}",
            metric_value=round(value, 3),
        )
        for dataset in results.datasets()
        for row in medians(results, [dataset])
        for rate, words in shown.items()
        if row.name == method and (value := row.value(rate)) is not None
    ]


def head_run(results: Results) -> Run:
    """A run of the fastest method that stops by the head, or else of those that ask it."""
    heads = [
        row
        for row in pool(results)
        if row.method.lossless and all(run.head is not None for run in row.runs)
    ]
    if not heads:
        raise ManifestError(
            "the card of a head needs a method that asks it (stop: head) on every prompt set"
        )
    stopped = [row for row in heads if row.method.stop.needs_head]
    return max(stopped or heads, key=merit).runs[0]


@contextmanager
def _assembled(
    template: str,
    out: Path,
    front: dict[str, Any],
    measured: Results,
    about: About,
    *,
    push_to: str | None,
    private: bool,
    name: str,
    target: str,
    **values: Any,
) -> Iterator[Path]:
    """The folder under a temporary name, to be filled; then card, upload if asked, its name."""
    data, unnamed = metadata(about, target=target, **front)
    data.model_name, data.eval_results = name, hub_results(measured, values["best"].name)
    results = measured.model_copy(update={"runs": _shortened(measured.runs)})
    generation = load_configs(target)[1].to_dict()
    text = render(
        template,
        name=name,
        target=public_name(target),
        table=readme_table(results),
        verifiers=verifiers.section(results),
        measures=about.measures,
        certificate=about.certificate,
        unnamed=[public_name(name) for name in unnamed],
        local=[path for path in values["load"].values() if path.startswith(ELSEWHERE)],
        sampling=results.runs[0].sampling,
        unapplied={name: UNAPPLIED[name] for name in unapplied(generation)},
        unapplied_words=unapplied_words(generation),
        chat=about.chat if load_tokenizer(target).chat_template else None,
        timed=results.timed,
        where=results.environment,
        methods={
            name: described(next(run.method for run in results.runs if run.name == name))
            for name in shown_methods(results)
        },
        chosen_on=results.chosen_on(),
        by_clock=list(dict.fromkeys(r.name for r in results.runs if r.method.stop.measured)),
        settings=code_of(values["best"]),
        **values,
    )
    with atomic_folder(out) as folder:
        yield folder
        write_text(folder / CARD, f"---\n{data.to_yaml()}\n---\n\n{text}")
        write_results(folder / "results.json", results)
        if push_to is None:
            return
        api = HfApi()
        try:
            url = api.create_repo(push_to, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=push_to,
                folder_path=folder,
                commit_message="Upload weights and measurements",
            )
            done = {
                "url": str(url),
                "private": api.model_info(push_to).private,  # as a repository that was there is
                "bytes": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
                "commit": commit.oid,
            }
            write_json(folder / UPLOAD, done)
        except errors.HTTPError as error:  # type: ignore[attr-defined]  # of httpx or of httpx2
            if isinstance(error, OSError):  # what the Hub answered, or its client says
                raise
            raise ConnectionError(f"cannot upload to {push_to} on the Hub: {error}") from error


def _measured(results: Results, source: Path, role: Literal["draft", "head"]) -> Results:
    """The results, which must be of an artefact's pair."""
    check_metrics(results)
    names = {getattr(run, role) for run in results.runs} - {None}
    if source not in map(Path, names):
        raise ManifestError(
            f"the results must measure the {role} {source}, they measure: "
            f"{', '.join(sorted(names)) or 'none'}; run the evaluation on it first"
        )
    return results


def _shortened(runs: Sequence[Run]) -> list[Run]:
    """Runs without this machine's folders and the addresses of servers."""
    shortened = []
    for run in runs:
        method, name = run.method, run.method.served_model
        if method.url:
            server = {"url": "http://SERVER", "served_model": name and public_name(name)}
            method = method.model_copy(update=server)
        folders = {
            role: name and public_name(name)
            for role, name in (("target", run.target), ("draft", run.draft), ("head", run.head))
        }
        shortened.append(run.model_copy(update={"method": method, **folders}))
    return shortened


@torch.inference_mode()
def _make_whole(model: Any) -> None:
    """Give a draft with a reduced vocabulary all rows of its output matrix, in place."""
    kept_ids = draft_vocabulary_ids(model)
    assert kept_ids is not None
    generator = torch.Generator().manual_seed(0)
    ids = kept_ids[torch.linspace(0, len(kept_ids) - 1, OWN_TEXTS).long()].unsqueeze(-1)
    read: list[Tensor] = []
    with capturing_hidden(model, read.append):
        for _ in range(OWN_LENGTH):
            logits = model(input_ids=ids, use_cache=False).logits
            q = probabilities(logits[:, -1], SamplingConfig())
            ids = torch.cat([ids, draw(q, generator).unsqueeze(-1)], dim=-1)
    # The matrix's own logits: some families scale them afterwards.
    states = read[-1].flatten(0, 1)
    restore_vocabulary(model, substitute_row(states, model.get_output_embeddings()(states)))


def _load_whole(source: Path) -> Any:
    """Load a draft in its own precision and refuse weights that do not fit its configuration."""
    model, info = from_hub("model", str(source), lambda: read_model(str(source), None, "auto"))
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ManifestError(
            f"the weights in {source} do not fit its config.json: {wrong}; engines would skip"
            " them silently, save the model again with save_pretrained"
        )
    return model.eval()
