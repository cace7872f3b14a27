"""Stage 5: assemble draft and head as Hub repositories, with cards made of what was measured.

Nothing is uploaded unless publish.draft_id or publish.head_id is given.

python recipes/publish.py --config recipes/configs/toy.yaml
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from eval.measuring.results import read_results
from eval.publishing.serving import served_lengths, serving_lines
from eval.reporting.verdict import verdict
from recipes.config import CERTIFICATE, RESULTS, PipelineConfig
from recipes.models import model_config
from recipes.recipe import Recipe
from recipes.releases import draft_release, head_release, measurements
from recipes.run import Stage, say
from recipes.sizes import in_bytes
from specdata.drafts import kind_of
from specdata.errors import ConfigError
from specdata.storage.files import PROGRESS, read_object, sha256

_METHOD_HINT = " (--method leaves only the methods that it names: give it once more, for this one)"


class Release(Stage):
    """Assemble what would be published; upload it where an id is given."""

    name, sections = "release", ("publish", "eval")
    is_alone, is_copy = True, True

    def stored_settings(self) -> dict[str, Any]:
        """Return its section."""
        return {"publish": self.config.publish.model_dump(mode="json")}

    @property
    def inputs(self) -> dict[str, str]:
        """The trained artefact, and its measurements."""
        inputs = {
            "draft": self.config.draft_in_use,
            "results": str(self.config.eval_folder / RESULTS),
        }
        if (certificate := self.config.eval_folder / CERTIFICATE).exists():
            inputs["certificate"] = str(certificate)
        head = self.config.head_in_use
        return {**inputs, "head": head} if head else inputs

    @property
    def size(self) -> str:
        """The copies."""
        seen = "private" if self.config.publish.private else "public"
        ids = [id_ for id_ in self.ids.values() if id_]
        upload = f", uploaded to {' and '.join(ids)} ({seen} if new)" if ids else ""
        return f"copies of {' and '.join(self.ids) or 'nothing'}, with model cards{upload}"

    @property
    def ids(self) -> dict[str, str | None]:
        """What is trained, "draft" or "head" -> the Hub id that it is uploaded to, if any."""
        config, publish = self.config, self.config.publish
        ids = {"draft": publish.draft_id} if config.draft else {}
        return ids | ({"head": publish.head_id} if config.head else {})

    def check(self) -> None:
        """Find what could not be published before it is trained."""
        from eval.publishing.metadata import About, check_repository

        config = self.config
        methods, publish = config.eval.methods, config.publish
        About(license=publish.license, language=publish.language)
        for what, name in (("draft", publish.draft_id), ("head", publish.head_id)):
            check_repository(name)
            if name is not None and what not in self.ids:
                raise ConfigError(f"publish.{what}_id is set, but this configuration trains none")
        if config.draft and not any(
            method.uses_draft
            and method.drafter == "chain"
            and not (method.stop.adaptive or method.mtp)
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
        from eval.publishing.release import UPLOAD

        # 1. The results, recomputed, of the models as they are now.
        results = measurements(self.config)
        # 2. Each artefact under another name: one that is there was finished by an earlier try.
        parts, private = self.ids, self.config.publish.private
        for name, push_to in parts.items():
            out = self.folder / PROGRESS / name
            if not out.exists():
                release = (draft_release if name == "draft" else head_release)(self.config)
                release(out=out, results=results, private=private, push_to=push_to)
        # 3. All of them in the place of what was there; somebody may have edited its cards.
        for former in self.folder.glob("[!.]*"):
            if former.is_dir():
                if (card := former / "README.md").is_file():
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
        """Print the verdict, and where the copies are."""
        say(verdict(read_results(self.config.eval_folder / RESULTS)))
        # Folders as they are called now: the run may have been moved since it was made.
        for name, upload in results.items():
            where = "not uploaded"
            if upload:
                seen = "private" if upload["private"] else "public"
                size, commit = in_bytes(upload["bytes"]), upload["commit"]
                where = f"uploaded to {upload['url']} ({seen}, {size}, commit {commit})"
            say(f"  {name}: {self.folder / name}, {where}")

    def next(self, arguments: Sequence[str]) -> list[str]:
        """Serve and upload what was assembled."""
        config, publish = self.config, self.config.publish
        lines = [f"look     {config.eval_folder}/report.html"]
        if config.draft:
            lines += _serve(config, publish.draft_id or f"{self.folder}/draft")
        unnamed = [f"--publish.{name}_id=OWNER/NAME" for name, id_ in self.ids.items() if not id_]
        if unnamed:
            lines.append(f"upload   {shlex.join(['draftsmith', 'publish', *arguments, *unnamed])}")
        return lines


def _serve(config: PipelineConfig, draft: str) -> list[str]:
    """Serve with vLLM, at a draft length that is to be measured there.

    Nothing of a draft that no engine loads, and if the models' output sizes are known and differ,
    because vLLM refuses such a pair.
    """
    target, kind = config.models.target, kind_of(model_config(config.draft_in_use))
    if kind.reads_states and not kind.layouts:
        return []
    released = model_config(str(config.folder("release") / "draft"))
    if len({each.get("vocab_size") for each in (model_config(target), released)} - {None}) > 1:
        return []
    depths = kind.depths(model_config(config.draft_in_use))
    lines = serving_lines(draft, target, kind, depths)
    line = lines["vLLM"]
    length, why = served_lengths(kind, depths)["vLLM"]
    line += f"  # {length} tokens: {why}"
    if depths == 1:
        line += "; draftsmith engine measures which length pays in vLLM"
    written = [f"write    {lines['draftsmith']}"] if kind.served.in_target else []
    return [*written, f"serve    {line}"]


RECIPE = Recipe("Assemble draft and head for the Hub.", (Release,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
