"""Stage 5: assemble draft and head as Hub repositories, with cards made of what was measured.

Nothing is uploaded unless publish.draft_id or publish.head_id is given.

python recipes/publish.py --config recipes/configs/toy.yaml
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.config import DistilConfig
from eval.analysis.prediction import Predictions
from eval.measuring.results import Results, check_metrics, read_results
from eval.publishing.serving import serving_lines
from eval.reporting.verdict import verdict
from recipes.config import PipelineConfig
from recipes.layout import (
    CERTIFICATE,
    RESULTS,
    draft_in_use,
    eval_folder,
    folder,
    head_folder,
    head_in_use,
)
from recipes.recipe import Recipe
from recipes.run import Stage, remove_caches, say, stage_record
from recipes.sizes import described, draft_size, in_bytes, reads_states, source_model
from recipes.steps import HUB_ID, CommandLine, Step, load_draft, load_head
from specdata.config import PromptSet
from specdata.draft_kinds import kind_of
from specdata.errors import ConfigError, ManifestError
from specdata.prompts.reading import source_of
from specdata.storage.files import PROGRESS, fingerprint, read_object, sha256
from specdata.storage.resume import read_record

if TYPE_CHECKING:
    from torch import Tensor

    from eval.publishing.metadata import About
    from eval.publishing.release import ForEngines

_METHOD_HINT = " (--method leaves only the methods that it names: give it once more, for this one)"


class Release(Stage):
    """Assemble what would be published; upload it where an id is given."""

    name, sections = "release", ("publish", "eval")
    is_alone, is_copy = True, True

    def stored_settings(self) -> dict[str, Any]:
        """Its section."""
        return {"publish": self.config.publish.model_dump(mode="json")}

    @property
    def inputs(self) -> dict[str, str]:
        """The trained artefact, and its measurements."""
        inputs = {
            "draft": draft_in_use(self.config),
            "results": str(eval_folder(self.config) / RESULTS),
        }
        if (certificate := eval_folder(self.config) / CERTIFICATE).exists():
            inputs["certificate"] = str(certificate)
        head = head_in_use(self.config)
        return {**inputs, "head": head} if head else inputs

    @property
    def size(self) -> str:
        """The copies."""
        parts = [draft_size(self.config)] if self.config.draft else []
        parts += ["the head"] if self.config.head else []
        publish, seen = self.config.publish, "private" if self.config.publish.private else "public"
        ids = [name for name in (publish.draft_id, publish.head_id) if name]
        upload = f", uploaded to {' and '.join(ids)} ({seen} if new)" if ids else ""
        return f"copies of {' and '.join(parts)}, with model cards{upload}" if parts else "nothing"

    def check(self) -> None:
        """Find what could not be published before it is trained."""
        from eval.publishing.metadata import About, check_repository

        config = self.config
        methods, publish = config.eval.methods, config.publish
        About(license=publish.license, language=publish.language)
        for what, name, trained in (
            ("draft_id", publish.draft_id, config.draft),
            ("head_id", publish.head_id, config.head),
        ):
            check_repository(name)
            if name is not None and trained is None:
                raise ConfigError(f"publish.{what} is set, but this configuration trains none")
        if config.draft and not any(
            method.uses_draft and method.drafter == "chain" and not method.stop.adaptive
            for method in methods
        ):
            raise ConfigError(
                "a draft's card needs a measured draft length: add a method with stop: fixed, "
                f"such as {{name: K=4, length: 4}}, to eval.methods{_METHOD_HINT}"
            )
        if config.head and not any(method.stop.reads_head for method in methods):
            raise ConfigError(
                "the run trains a head and no method asks it, so its card has no figures: "
                f"leave head out, or add {{name: head, stop: head}} to eval.methods{_METHOD_HINT}"
            )

    def run(self) -> dict[str, Any]:
        """Assemble and upload."""
        from eval.publishing.release import UPLOAD, release_head
        from eval.reporting.rendering import public_name

        config = self.config
        results = measurements(config)
        publish, private = config.publish, config.publish.private
        parts: dict[str, Callable[..., object]] = {}
        if config.draft:
            parts["draft"] = partial(draft_release(config), push_to=publish.draft_id)
        if head := head_in_use(config):
            made, draws = stage_record(head_folder(config)), config.labels.draws
            trained, tokens = made["results"], f"{draws} drafted token{'' if draws == 1 else 's'}"
            tokens += " a position"
            if made["config"]["labels"].get("greedy"):  # as it was when the head was trained
                tokens = "the draft's likeliest token, which is kept with p"
            base = publish.draft_id or draft_in_use(config)
            sets = _training_sets(config)
            predicted = stage_record(eval_folder(config))["results"].get("predictions")
            shared = _about(config)
            about = replace(shared, base_model=base, datasets=sets, measures=trained["after"])
            parts["head"] = partial(
                release_head,
                Path(head),
                about=about,
                trained=f"{trained['train_rows']} rollouts of "
                f"{', '.join(map(public_name, sets))} with {tokens}",
                predictions=predicted and Predictions.model_validate(predicted, strict=False),
                push_to=publish.head_id,
            )
        for name, release in parts.items():
            out = self.folder / PROGRESS / name
            if not out.exists():  # else an interrupted run has finished this one
                release(out=out, results=results, private=private)
        for former in self.folder.glob("[!.]*"):
            if former.is_dir():
                if (card := former / "README.md").is_file():  # somebody may have edited it
                    card.replace(self.folder / f"{former.name}.README-{sha256(card)[:8]}.md")
                shutil.rmtree(former)
        for name in parts:
            (self.folder / PROGRESS / name).replace(self.folder / name)
        shutil.rmtree(self.folder / PROGRESS, ignore_errors=True)
        uploads = {name: self.folder / name / UPLOAD for name in parts}
        return {
            name: read_object(file) if file.exists() else None for name, file in uploads.items()
        }

    def show(self, results: dict[str, Any]) -> None:
        """Print the verdict, and where the copies are; nothing is left to be made of datasets."""
        remove_caches(self.config)
        say(verdict(read_results(eval_folder(self.config) / RESULTS)))
        # Folders as they are called now: the run may have been moved since it was made.
        for name, upload in results.items():
            where = "not uploaded"
            if upload:
                seen = "private" if upload["private"] else "public"
                size, commit = in_bytes(upload["bytes"]), upload["commit"]
                where = f"uploaded to {upload['url']} ({seen}, {size}, commit {commit})"
            say(f"  {name}: {self.folder / name}, {where}")

    def next(self, line: CommandLine) -> list[Step]:
        """Load, serve and upload what was assembled."""
        config, unnamed = self.config, []
        steps = [Step("look", f"{eval_folder(config)}/report.html")]
        if config.draft:
            draft, states = config.publish.draft_id or f"{self.folder}/draft", reads_states(config)
            unnamed += [] if config.publish.draft_id else ["--publish.draft_id", HUB_ID]
            here = draft_in_use(config) if states else draft  # of engines' layouts imported alone
            steps += [load_draft(here, states=states), *_serve(config, draft)]
        if config.head:
            steps.append(load_head(config.publish.head_id or self.folder / "head"))
            unnamed += [] if config.publish.head_id else ["--publish.head_id", HUB_ID]
        if unnamed:
            steps.append(Step("upload", line.recipe("publish", *unnamed)))
        return steps


def draft_release(config: PipelineConfig, engines: ForEngines | None = None) -> Callable[..., Path]:
    """What assembles a run's draft, by default in its own layout, with all that its card says."""
    from eval.publishing.release import release_draft

    assert config.draft is not None
    trained, draft = stage_record(folder(config, "draft"))["results"], Path(draft_in_use(config))
    what = "acceptance (an upper bound)" if trained["is_bound"] else "acceptance"
    rates = {
        f"{what} before distillation": trained["acceptance_before"],
        f"{what} after distillation": trained["acceptance_after"],
    }
    if trained["steps"] == 0:
        rates = {what: trained["acceptance_after"]}
    about = replace(
        _about(config),
        base_model=None if config.draft.init.kind == "fresh" else source_model(config),
        datasets=_texts_of_draft(config, config.draft),
        measures=rates,
    )
    kind = kind_of(described(str(draft)))
    if engines is None and kind.layouts:
        is_asked = kind.asks_head and config.head and config.head.kind == "confidence"
        head = head_in_use(config) if is_asked else None
        engines = for_engines(draft, config.models.target, next(iter(kind.layouts)), head)
    return partial(release_draft, draft, about=about, engines=engines)


def for_engines(
    draft: Path, target: str, layout: str, head: str | Path | None = None
) -> ForEngines:
    """A draft of `draft.init.layout`, or an imported one, in a layout that engines hold."""
    from distill.kinds import LAYOUTS
    from distill.published import write
    from eval.publishing.release import ForEngines

    confidence = _confidence(draft, target, head) if head else None
    of_kind = LAYOUTS[kind_of(described(str(draft))).name]
    writes = partial(write, of_kind, draft, name=layout, target=target, confidence=confidence)
    return ForEngines(layout, writes, is_asked=confidence is not None)


def _confidence(draft: Path, target: str, folder: str | Path) -> tuple[Tensor, Tensor]:
    """The weight (1, H + r) and bias (1,) of a head, whose sigmoid is the probability."""
    from heads import ConfidenceHead
    from heads.probe import check_head
    from recipes.run_eval import load_head
    from specdata.models import load_model

    head = load_head(folder)
    if not isinstance(head, ConfidenceHead):
        raise ConfigError(
            f"{folder} must be a head of kind confidence, the one form that engines ask, and "
            f"is of kind {head.kind}: train one with head.kind: confidence"
        )
    check_head(load_model(str(draft), target=target), head)
    output = head.output
    return output.weight.detach(), output.bias.detach() + math.log(head.rejection_weight)


def _about(config: PipelineConfig) -> About:
    """What every card of a run says."""
    from eval.publishing.metadata import About

    certificate, sentence = eval_folder(config) / CERTIFICATE, None
    if certificate.exists():
        remedy = "remove it, and certify again"
        sentence = read_record(certificate, ["sentence"], remedy)["sentence"]
    return About(
        license=config.publish.license,
        language=config.publish.language,
        certificate=sentence,
        chat=config.chat_template_kwargs,
    )


def _serve(config: PipelineConfig, draft: str) -> list[Step]:
    """Serve with vLLM, at a draft length that is to be measured there.

    Nothing of a draft that no engine loads, and if the models' output sizes are known and differ,
    because vLLM refuses such a pair.
    """
    target, kind = config.models.target, kind_of(described(draft_in_use(config)))
    if kind.reads_states and not kind.layouts:
        return []
    released = described(str(folder(config, "release") / "draft"))
    if len({each.get("vocab_size") for each in (described(target), released)} - {None}) > 1:
        return []
    depths = kind.depths(described(draft_in_use(config)))
    line = serving_lines(draft, target, kind, depths)["vLLM"]
    if depths > 1:
        return [Step("serve", line)]
    return [Step("serve", f"{line}  # which length pays in vLLM, draftsmith engine measures")]


def measurements(config: PipelineConfig) -> Results:
    """The measurements, with models named as this run names them now."""
    evaluation = eval_folder(config)
    results = read_results(evaluation / RESULTS)
    check_metrics(results, evaluation / RESULTS)
    measured = stage_record(evaluation)["inputs"]
    names = {"target": config.models.target, "draft": draft_in_use(config)}
    if head := head_in_use(config):
        names["head"] = head
    for role, name in names.items():
        if measured.get(role) != fingerprint(name):
            raise ManifestError(
                f"the {role} {name} is not the one that {evaluation} measured (its contents "
                f"differ): restore it, or remove {evaluation} and run the evaluation again"
            )
    runs = [
        run.model_copy(update={role: name for role, name in names.items() if getattr(run, role)})
        for run in results.runs
    ]
    return results.model_copy(update={"runs": runs})


def _training_sets(config: PipelineConfig) -> list[str]:
    """The sources of the prompt sets that were trained on."""
    return [
        source_of(prompts) or prompts.name
        for prompts in config.rollouts.sets
        if prompts.split == "train"
    ]


def _texts_of_draft(config: PipelineConfig, draft: DistilConfig) -> list[str]:
    """The sources of what the draft was trained on: conversations, and prompt sets of rollouts."""
    talks = draft.finetune.conversations if draft.finetune else []
    sources = [source_of(PromptSet(name, "train", 0)) or name for name in talks]
    if draft.epochs or (draft.finetune and not talks):
        sources += _training_sets(config)
    return sources


RECIPE = Recipe("Assemble draft and head for the Hub.", (Release,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
