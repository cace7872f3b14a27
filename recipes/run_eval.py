"""Stage 4: decode the same prompts with every method, and report.

python recipes/run_eval.py --config recipes/configs/toy.yaml [--method NAME ...]

A finished evaluation is of its list of methods; for another list name another folder:
--method "K=4" --method "{name: my tree, verifier: traversal, drafter: tree, widths: [2, 2]}" \
--eval.folder eval-mine
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.measuring.lengths import finds_lengths
from eval.measuring.methods import check_methods, needs_fit
from eval.measuring.results import read_results, write_results
from eval.measuring.scores import check_references
from eval.reporting.report import terminal, write_report
from eval.reporting.texts import sampled_texts
from recipes.config import RESULTS, named
from recipes.experiment import load_experiment
from recipes.models import (
    block_of,
    check_decodable,
    check_loading,
    check_room,
    check_shared,
    generation_config_of,
    has_chat_template,
    kind_in,
    positions_of,
    shared_tokenizer,
)
from recipes.recipe import Recipe
from recipes.run import Stage, command_line, console, say
from recipes.sizes import prompt_count
from specdata.errors import ConfigError
from specdata.processes import is_main
from specdata.prompts.reading import is_file, is_remote, prompt_inputs, raw_prompts
from specdata.sampling import unapplied_words
from specdata.storage.files import PROGRESS
from specdata.target_heads import find_head
from specdata.terminal import progress

if TYPE_CHECKING:
    from eval.measuring.experiment import Experiment


class Eval(Stage):
    """Measure every method."""

    name, sections = "eval", ("eval",)
    is_answer = True

    @property
    def folder(self) -> Path:
        """output/eval, unless eval.folder or head.folder says otherwise."""
        return self.config.eval_folder

    def stored_settings(self) -> dict[str, Any]:
        """Return its section, methods by name, so that a refusal lists those that differ."""
        values = self.section.model_dump(mode="json")
        methods = {method["name"]: method for method in values["methods"]}
        values |= {"methods": methods, "folder": self.folder.name}
        load = {"target": self.config.models.load.target, "draft": self.config.models.load.draft}
        # It decides how long a forward takes.
        attention = {role: each.attn_implementation for role, each in load.items()}
        values |= {"attention": attention} if any(attention.values()) else {}
        return {"eval": values, **self.config.sampled("target", "draft")}

    @property
    def remedy(self) -> str:
        """The advice to measure into another folder."""
        return (
            "choose another folder for another list of methods with --eval.folder NAME, or remove "
            f"{self.folder} to measure again"
        )

    @property
    def inputs(self) -> dict[str, str]:
        """The models, files of prompts, and labels where rules are fitted on them."""
        config = self.config
        inputs = {"target": config.models.target, "draft": config.draft_in_use}
        inputs |= prompt_inputs(config.eval.sets)
        if head := config.evaluated_head:
            inputs["head"] = head
        if config.head and needs_fit(config.eval):
            inputs["labels"] = str(config.folder("labels"))
        return inputs

    @property
    def size(self) -> str:
        """Generations."""
        evaluation = self.config.eval
        prompts = prompt_count(evaluation.sets, self.config.seed)
        return (
            f"results and report.html of {prompts or 'all'} prompts x "
            f"{len(evaluation.methods)} methods, at most {evaluation.max_new_tokens} tokens each"
            + ", and with other fixed lengths if dev asks for them"
            * finds_lengths(evaluation)
        )

    def check(self) -> None:
        """Refuse methods that cannot be measured here, and prompts that were trained on."""
        from specdata.prompts.loading import check_sets

        config, target = self.config, self.config.models.target
        check_methods(config.eval, config.sampling, head=config.head is not None)
        check_loading(config, "eval")
        methods = [each for each in config.eval.methods if each.uses_draft and not each.mtp]
        if own := next((each.name for each in config.eval.methods if each.mtp), None):
            with named(f"method {own!r}"):
                find_head(target)
        assisted = [each.name for each in methods if each.decoder == "assisted"]
        if assisted and kind_in(config).reads_states:
            raise ConfigError(
                "transformers' assisted generation does not hand a draft its target's states, "
                f"which this one reads: leave the methods {', '.join(assisted)} out of eval.methods"
            )
        if (block := block_of(config)) is not None:
            for method in methods:
                with named(f"method {method.name!r}"):
                    method.check_block(block)
        if config.models.load.target.is_spread and config.eval.engine != "eager":
            raise ConfigError(
                f"eval.engine {config.eval.engine!r} captures the forward of a model on one "
                "device, and models.load.target.device_map: auto spreads it over several: set "
                "eval.engine to eager, or leave device_map out"
            )
        check_room("eval", config.eval.max_new_tokens, target, positions_of(config, target))
        check_shared(config, config.given_models)
        check_decodable(config)
        trained: set[str] = set()
        if config.draft or config.head:
            trained = {each.name for each in config.rollouts.sets if each.split == "train"}
        if config.draft and config.draft.finetune:
            trained |= {*config.draft.finetune.conversations}
        for each in config.eval.sets:
            # A file is read whole, whatever split it is said to be.
            if each.name in trained and (each.split == "train" or is_file(each.name)):
                raise ConfigError(
                    f"eval.sets must hold prompts that nothing was trained on, and {each.name} is "
                    "in rollouts.sets with split train, or among draft.finetune.conversations: "
                    "name other prompts"
                )
        has_template = has_chat_template(config)
        check_sets(config.eval.sets, config.seed, here_alone=True, has_template=has_template)
        if not any(map(is_remote, config.eval.sets)):
            read = partial(raw_prompts, seed=config.seed, has_template=has_template is not False)
            prompts = chain.from_iterable(map(read, config.eval.sets))
            check_references(config.eval.scores, prompts, [each.name for each in config.eval.sets])

    def run(self) -> dict[str, Any]:
        """Measure with every process that can, and report in the main one."""
        config = self.config
        from eval.analysis.verifier_table import table_of
        from eval.measuring.environment import joins_measuring
        from eval.measuring.scores import Scorer
        from specdata.prompts.loading import dropped

        # 1. Which processes decode: of those that share a device one alone, if it is timed.
        on_cpu = config.models.load.target.device_map == "cpu"
        if not joins_measuring(timed=config.eval.batch == 1, on_cpu=on_cpu, say=say):
            return {}
        # 2. Prompts and models, with fitted parameters of rules where methods give none.
        experiment, loaded, fitted = load_experiment(config)
        if scores := config.eval.scores:
            scorer = Scorer(scores, experiment.prompts, shared_tokenizer(config.models.target))
            experiment = replace(experiment, scorer=scorer)
        for line in dropped(loaded.report):
            say(line)
        if experiment.engine != config.eval.engine:
            engine = f"Engine {config.eval.engine} gains nothing but on a CPU"
            say(f"{engine}: forwards run {experiment.engine}.")
        # 3. Every prompt with every method, in turns; prompts that are stored are not done again.
        #    Dev comes first, until it asks for no other length.

        def measure(part: Experiment, title: str = "lengths on dev") -> None:
            generations = len(part.prompts) * len(part.config.methods)
            with progress(generations, title, "generation", is_shown=is_main()) as bar:
                part.measure(bar.update)

        experiment = experiment.with_lengths(measure, say)
        measure(experiment, "evaluation")
        if not is_main():
            return {}
        # 4. Results of the stored counts, and the table of every verifier.
        results = experiment.results()
        verifiers = table_of(experiment, results, lambda kind: say(f"  verifiers on {kind}"))
        results = results.model_copy(update={"verifiers": verifiers})
        write_results(self.folder / RESULTS, results)
        # 5. The report.
        left_out = unapplied_words(generation_config_of(config.models.target))
        tokenizer = shared_tokenizer(config.models.target)
        texts = sampled_texts(results, experiment.texts(), tokenizer)
        write_report(results, self.folder, command_line(self.folder), left_out, texts)
        shutil.rmtree(self.folder / PROGRESS, ignore_errors=True)
        return {
            "runs": len(results.runs),
            "prompts": len(loaded.prompts),
            "prompt_sets": loaded.report,
            "calibration": fitted,
            "environment": results.environment.model_dump(mode="json"),
        }

    def show(self, results: dict[str, Any]) -> None:
        """Print the table."""
        console.print(terminal(read_results(self.folder / RESULTS)))

    def next(self, arguments: Sequence[str]) -> list[str]:
        """Read the report."""
        return [f"look     {self.folder / 'report.html'}"]


RECIPE = Recipe("Decode prompts with every method, and report.", (Eval,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
