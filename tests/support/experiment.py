"""What several files of tests use of `test_experiment`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.decode_config import Method
from eval.measuring.experiment import Artefacts, Experiment
from eval.measuring.methods import EvalConfig
from eval.measuring.results import Results
from specdata.config import PromptSet
from specdata.probability import SamplingConfig
from specdata.prompts.prompt import Prompt
from tests.support.decoder import head
from tests.support.synthetic_results import ENVIRONMENT
from tests.support.tiny import tiny_llama

PROMPTS = [
    Prompt(f"p{number}", dataset, "test", [2 + number, 5, 7][: 1 + number % 3])
    for dataset in ("maths", "code")
    for number in range(5)
]


PLAIN = Method(name="plain", decoder="plain")


METHODS = [
    PLAIN,
    Method(name="K=3", length=3),
    Method(name="head", stop="head", threshold=0.5),
    Method(name="cost", stop="cost", draft_seconds=0.1, token_seconds=1.0),
    Method(name="tree", verifier="traversal", drafter="tree", widths=(2, 2)),
    Method(name="paths", verifier="rrs", drafter="paths", paths=2, length=2),
]


def evaluate(
    folder: Path,
    methods: list[Method],
    *,
    where: Mapping[str, Any] = {},
    log: list[str] | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    **settings: object,
) -> Results:
    sets = [PromptSet("maths", "test", 5), PromptSet("code", "test", 5)]
    config = EvalConfig(sets=sets, methods=methods, max_new_tokens=12, **settings)  # type: ignore[arg-type]
    models = Artefacts(
        tiny_llama(2, vocab=40, layers=2),
        tiny_llama(1, vocab=40),
        head().double(),
        {"target": "target", "draft": "draft", "head": "head"},
    )
    done, log = [], [] if log is None else log
    models.draft.register_forward_pre_hook(lambda *_: log.append("draft"))

    def report(generations: int) -> None:
        done.append(generations)
        log.append("done")

    environment = ENVIRONMENT.model_copy(update={"batch_size": config.batch, **where})
    experiment = Experiment(models, prompts, folder, config, SamplingConfig(), 5, environment)
    experiment.measure(report)
    results = experiment.results()
    assert sum(done) == len(prompts) * len(methods)
    return results
