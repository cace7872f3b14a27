"""Stage 4: decode the same prompts with every method, and report.

python recipes/run_eval.py --config recipes/configs/toy.yaml [--method NAME ...]

A finished evaluation is of its list of methods; for another list name another folder:
--method "K=4" --method "{name: my tree, verifier: traversal, drafter: tree, widths: [2, 2]}" \
--eval.folder eval-mine
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.analysis.prediction import Predictions, predictions
from eval.drafting.stopping import fit_rules
from eval.measuring.methods import (
    check_methods,
    needs_fit,
    path_drafts,
    with_fit,
)
from eval.measuring.results import read_results, write_results
from eval.measuring.samples import SAMPLES, make_samples, read_samples
from eval.reporting.report import Context, terminal, write_report
from eval.runtime.engines import engine_on
from recipes.checks import (
    check_decodable,
    check_loading,
    check_room,
    check_shared,
    given_models,
    has_chat_template,
    named,
)
from recipes.config import PipelineConfig
from recipes.layout import RESULTS, draft_in_use, eval_folder, folder, head_in_use, sampled
from recipes.recipe import Recipe
from recipes.run import RUN, Stage, console, say, stage_record
from recipes.sizes import block_of, generation_of, prompt_count, reads_states
from recipes.steps import CommandLine, Step
from specdata.errors import ConfigError, without_passwords
from specdata.processes import is_main, local_process_count, local_rank, process_count, rank
from specdata.prompts.reading import is_file, prompt_inputs
from specdata.sampling import unapplied_words
from specdata.storage.files import PROGRESS, locked, write_json
from specdata.storage.resume import read_record
from specdata.terminal import progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.measuring.experiment import Experiment
    from eval.measuring.results import Results, VerifierRow
    from heads import BaseHead
    from specdata.prompts.loading import LoadedPrompts


class Eval(Stage):
    """Measure every method."""

    name, sections = "eval", ("eval",)
    is_answer = True

    @property
    def folder(self) -> Path:
        """output/eval, unless eval.folder or head.folder says otherwise."""
        return eval_folder(self.config)

    def stored_settings(self) -> dict[str, Any]:
        """Its section, the methods by name, so that a refusal lists those that differ."""
        evaluation = self.config.eval
        methods = {method.name: method.model_dump(mode="json") for method in evaluation.methods}
        values = {
            "eval": {
                **evaluation.model_dump(mode="json"),
                "methods": methods,
                "folder": self.folder.name,
            }
        }
        return {**values, **sampled(self.config, "target", "draft")}

    @property
    def remedy(self) -> str:
        """Another folder."""
        return (
            "choose another folder for another list of methods with --eval.folder NAME, or remove "
            f"{self.folder} to measure again"
        )

    @property
    def inputs(self) -> dict[str, str]:
        """The models, files of prompts, and labels where rules are fitted on them."""
        config = self.config
        inputs = {"target": config.models.target, "draft": draft_in_use(config)}
        inputs |= {f"path draft {name}": name for name in path_drafts(config.eval)}
        inputs |= prompt_inputs(config.eval.sets)
        if config.eval.reward_model:
            inputs["reward model"] = config.eval.reward_model
        if head := _head_asked(config):
            inputs["head"] = head
        if config.head and needs_fit(config.eval):
            inputs["labels"] = str(folder(config, "labels"))
        return inputs

    @property
    def size(self) -> str:
        """Generations."""
        evaluation = self.config.eval
        prompts = prompt_count(evaluation.sets, self.config.seed)
        return (
            f"results, samples and report.html of {prompts or 'all'} prompts x "
            f"{len(evaluation.methods)} methods, at most {evaluation.max_new_tokens} tokens each"
        )

    def check(self) -> None:
        """Refuse methods that cannot be measured here."""
        from specdata.prompts.loading import check_sets

        config = self.config
        check_methods(config.eval, config.sampling, head=config.head is not None)
        check_loading(config, "eval")
        methods = [each for each in config.eval.methods if each.uses_draft]
        assisted = [each.name for each in methods if each.decoder == "assisted"]
        if assisted and reads_states(config):
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
        check_room(config, "eval", config.eval.max_new_tokens)
        check_shared(config, [*given_models(config), *path_drafts(config.eval)])
        check_decodable(config)
        has_template = has_chat_template(config)
        if config.draft or config.head:
            trained = {each.name for each in config.rollouts.sets if each.split == "train"}
            if config.draft and config.draft.finetune:
                trained |= {*config.draft.finetune.conversations}
            for each in config.eval.sets:
                # A file is read whole, whatever split it is said to be.
                if each.name in trained and (each.split == "train" or is_file(each.name)):
                    raise ConfigError(
                        f"eval.sets must hold prompts that nothing was trained on, and "
                        f"{each.name} is in rollouts.sets with split train, or among "
                        "draft.finetune.conversations: name other prompts"
                    )
        check_sets(config.eval.sets, config.seed, here_alone=True, has_template=has_template)

    def run(self) -> dict[str, Any]:
        """Measure with every process that can, and report in the main one."""
        config = self.config
        from eval.measuring.environment import measured_on
        from eval.measuring.experiment import DECODING
        from eval.measuring.scores import Scorer
        from specdata.models import load_tokenizer
        from specdata.prompts.loading import dropped
        from specdata.threads import threads_of, using_threads

        if not _is_measuring(config):
            return {}
        experiment, loaded, fitted = load_experiment(config)
        prompts, environment = loaded.prompts, experiment.environment
        tokenizer = load_tokenizer(config.models.target)
        if (scores := config.eval.scores) or config.eval.reward_model:
            scorer = Scorer(scores, prompts, tokenizer, config.eval.reward_model)
            experiment = replace(experiment, scorer=scorer)
        for line in dropped(loaded.report):
            say(line)
        used = engine_on(config.eval.engine, environment.device)
        if used != config.eval.engine:
            say(f"Engine {config.eval.engine} gains nothing but on a CPU: forwards run {used}.")
        generations = len(prompts) * len(config.eval.methods)
        with (
            using_threads(config.eval.threads),
            progress(generations, "evaluation", "generation", is_shown=is_main()) as bar,
        ):
            experiment.measure(bar.update)
        if not is_main():
            return {}
        devices = measured_on(self.folder) or [environment.device]
        threads = threads_of(DECODING, experiment.models.target.device).count
        hardware = {**environment.hardware, "threads": config.eval.threads or threads}
        where = environment.model_copy(update={"devices": devices, "hardware": hardware})
        results = experiment.results().model_copy(update={"environment": where})
        with using_threads(config.eval.threads or threads):
            verifiers = _verifiers(experiment, results)
        results = results.model_copy(update={"verifiers": verifiers})
        write_results(self.folder / RESULTS, results)
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        samples = make_samples(prompts, self.folder, decode)
        write_json(self.folder / SAMPLES, samples.model_dump(mode="json"))
        predicted = _predictions(config, experiment.models.draft)
        write_report(results, self.folder, _context(config, predicted))
        shutil.rmtree(self.folder / PROGRESS, ignore_errors=True)
        return {
            "runs": len(results.runs),
            "prompts": len(prompts),
            "prompt_sets": loaded.report,
            "calibration": fitted,
            "predictions": predicted and predicted.model_dump(mode="json"),
            "environment": where.model_dump(mode="json"),
        }

    def show(self, results: dict[str, Any]) -> None:
        """Print the table."""
        console.print(terminal(read_results(self.folder / RESULTS)))

    def next(self, line: CommandLine) -> list[Step]:
        """Read the report; assemble what was trained, if anything was."""
        return [Step("look", str(self.folder / "report.html")), *super().next(line)]


def load_experiment(
    config: PipelineConfig,
) -> tuple[Experiment, LoadedPrompts, dict[str, Any] | None]:
    """Load what an evaluation measures.

    Returns:
        The experiment, with fitted parameters of rules where methods give none; its prompts; those
        parameters, if any were fitted.
    """
    from eval.measuring.environment import describe_environment
    from eval.measuring.experiment import Artefacts, Experiment
    from specdata.draft_models.states_draft import states_input
    from specdata.draft_models.taps import attach
    from specdata.models import (
        check_shared_vocabulary,
        load_model,
        load_tokenizer,
        prompt_limits,
    )
    from specdata.prompts.loading import load_prompts
    from specdata.storage.dataset import example_ids
    from specdata.threads import using_threads

    models, evaluation, output = config.models, config.eval, eval_folder(config)
    head_name, draft_name = _head_asked(config), draft_in_use(config)
    learns = config.draft or config.head
    tokenizer = load_tokenizer(models.target)
    names = [draft_name, *path_drafts(evaluation)]
    for name in names:
        check_shared_vocabulary(tokenizer, load_tokenizer(name))
    loaded = load_prompts(
        evaluation.sets,
        tokenizer,
        seed=config.seed,
        template_variables=config.chat_template_kwargs,
        trained_on=example_ids(folder(config, "rollouts"), "train") if learns else (),
        **prompt_limits(models.target, evaluation.max_new_tokens),
    )
    halves, prompts = {(each.dataset, each.split == "dev") for each in loaded.prompts}, []
    for each in loaded.prompts:
        is_both = (each.dataset, each.split != "dev") in halves  # a set of two splits is two
        name = f"{each.dataset}-{each.split}" if is_both else each.dataset
        prompts.append(replace(each, dataset=name))
    target = load_model(models.target, load=models.loading("target"))
    draft, *others = (load_model(name, load=models.loading("draft")) for name in names)
    for each in (draft, *others):
        if states_input(each) is not None:
            attach(each, target)
    head, fitted = _own_head(head_name) if head_name else None, None
    if needs_fit(evaluation):
        with locked(output / PROGRESS / "calibration.lock"):  # one fits, all read
            fitted = _fitted(config, draft, output / "calibration.json")
        evaluation = with_fit(evaluation, fitted)
    artefacts = Artefacts(
        target,
        draft,
        head,
        {"target": models.target, "draft": draft_name, "head": head_name},
        dict(zip(names[1:], others, strict=True)),
    )
    with using_threads(evaluation.threads):
        environment = describe_environment(
            device=str(target.device),
            dtype=models.dtype_of("target"),
            batch_size=evaluation.batch,
        )
    sampling, seed = config.sampling, config.seed
    experiment = Experiment(artefacts, prompts, output, evaluation, sampling, seed, environment)
    return experiment, replace(loaded, prompts=prompts), fitted


def _head_asked(config: PipelineConfig) -> str | None:
    """The run's head; None if no method asks it."""
    asks = any(method.stop.reads_head for method in config.eval.methods)
    return head_in_use(config) if asks else None


def _predictions(config: PipelineConfig, draft: PreTrainedModel) -> Predictions | None:
    """How well the run's head predicts its labels; None if no method asks it."""
    if (head := _head_asked(config)) is None:
        return None
    from specdata.labels.make import are_greedy, load_labels, sampling_of

    where = folder(config, "labels")
    if sampling_of(where) != config.sampling:
        return Predictions(reason="labels were made under another sampler than the evaluation's")
    if are_greedy(where):
        return Predictions(reason="labels are of likeliest tokens, and an evaluation draws")
    labels = load_labels(where, config.sampling)
    return predictions(labels, draft, _own_head(head).to(draft.device), config.sampling)


def _verifiers(experiment: Experiment, results: Results) -> list[VerifierRow]:
    """The table of every verifier, each kind of draft kept as soon as it is done."""
    evaluation = experiment.config
    if not evaluation.verifier_seconds or not any(run.method.uses_draft for run in results.runs):
        return []
    import torch

    from eval.analysis.round_times import RoundSeconds
    from eval.analysis.verifier_table import Measured, verifier_table

    plain, chains, branching = (
        [each for run in some for each in run.generations]
        for some in (
            [run for run in results.runs if run.method.decoder == "plain"],
            [run for run in results.runs if run.method.is_chain and run.method.fixed_length],
            [run for run in results.runs if run.method.branches],
        )
    )
    measured = Measured(
        experiment.models.target,
        experiment.models.draft,
        [
            (prompt.dataset, torch.tensor(prompt.ids))
            for prompt in experiment.prompts
            if prompt.dataset in results.datasets()
        ],
        experiment.sampling,
        RoundSeconds.of(plain, chains, branching),
        {
            method.name: method.decoding(experiment.sampling)
            for method in evaluation.methods
            if method.decoder == "speculative"
        },
        experiment.seed,
        evaluation.max_new_tokens,
    )
    return verifier_table(
        measured,
        seconds=evaluation.verifier_seconds,
        folder=experiment.folder / PROGRESS / "verifiers",
        report=lambda kind: say(f"  verifiers on {kind}"),
    )


def _is_measuring(config: PipelineConfig) -> bool:
    """True if this process measures; said, in the main one, if there are others."""
    import torch

    from eval.measuring.environment import is_measuring, who_measures

    timed, devices = config.eval.batch == 1, torch.cuda.device_count()
    if process_count() > 1:
        who = who_measures(
            timed=timed,
            processes=process_count(),
            local_processes=local_process_count(),
            devices=devices,
        )
        say(f"  {who}")
    return is_measuring(timed=timed, rank=rank(), local_rank=local_rank(), devices=devices)


def _fitted(config: PipelineConfig, draft: PreTrainedModel, path: Path) -> dict[str, Any]:
    """Parameters of stopping rules that no method gives, kept so that a resume uses the same.

    Besides their values it holds the number of labelled `rows` that they were fitted on.
    """
    if path.is_file():
        return read_record(path, (), f"remove {path} and run the same command again")
    from eval.analysis.traces import acceptance_traces
    from specdata.labels.make import are_greedy, load_labels
    from specdata.storage.dataset import of_split

    values, rows, where = {}, 0, folder(config, "labels")
    if config.head and not are_greedy(where):
        # Not on the rollouts that the draft was distilled on: there it is accepted more often.
        labels = of_split(load_labels(where, config.sampling), "dev", where)
        traces = acceptance_traces(labels, draft=draft, sampling=config.sampling)
        rules = [method.stop for method in config.eval.methods]
        values, rows = fit_rules(rules, traces.tokens, traces.accept), len(labels)
        say(f"  {', '.join(values)} of stopping rules fitted on {rows} labelled rollouts")
    else:
        why = "labels of drawn tokens" if config.head else "labels (no head section)"
        say(f"  this run has no {why}: stopping rules keep their first guesses")
    fitted = {**values, "rows": rows}
    write_json(path, fitted)
    return fitted


def load_head(source: str | Path, remedy: str = "") -> BaseHead:
    """A head from a folder or the Hub; if there is none, a ConfigError that ends in the remedy."""
    from heads import BaseHead

    try:
        return BaseHead.from_pretrained(source)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot load the head {str(source)!r}: {error}{remedy}") from error


def _own_head(name: str) -> BaseHead:
    remedy = f"; remove {Path(name).parent} and train it again with recipes/train_head.py"
    return load_head(name, remedy)


def _context(config: PipelineConfig, predicted: Predictions | None) -> Context:
    """What the results do not know: how well the head predicts, the command, and texts."""
    output, command = eval_folder(config), ""
    if (output / RUN).is_file():
        program, *given = map(without_passwords, stage_record(output)["arguments"])
        command = shlex.join([Path(program).name, *given])
    samples = read_samples(output / SAMPLES)
    left_out = unapplied_words(generation_of(config.models.target))
    return Context(predicted, command, samples, left_out)


RECIPE = Recipe("Decode prompts with every method, and report.", (Eval,))

if __name__ == "__main__":
    sys.exit(RECIPE.run())
