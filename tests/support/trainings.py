"""A pair's draft distilled, and the trainer that does it, with what a test changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from distill.config import DistilConfig, FinetuneConfig, LoraConfig
from distill.distillation import DistilResult, DistilTrainer, distil, draft_trainer
from distill.finetune import finetune
from specdata.config import Config
from specdata.models import load_model
from specdata.sampling import SamplingConfig
from specdata.top_logits import TopLogitDistributions
from tests.support.random_pair import texts_of

C = TypeVar("C", bound=Config)
QUICK = DistilConfig(epochs=2, learning_rate=5e-3, save_steps=4, report_to=[])
PLAIN = SamplingConfig()


def changed(config: C, **changes: object) -> C:
    """The configuration with some settings changed, checked again."""
    return type(config)(**{**config.model_dump(), **changes})


def distilled(
    pair: Path,
    out: Path,
    config: DistilConfig = QUICK,
    sampling: SamplingConfig = PLAIN,
    *,
    rows: int = 48,
    **given: Any,
) -> DistilResult:
    """Distil the draft of a pair on rollouts of arithmetic; `given` are arguments of `distil`."""
    settings: dict[str, Any] = {"target": pair / "target", "draft": pair / "draft", "seed": 0}
    if not {"train", "dev"} <= given.keys():
        settings |= {"train": texts_of(pair, rows, seed=1), "dev": texts_of(pair, 8, seed=2)}
    return distil(out=out, config=config, sampling=sampling, **{**settings, **given})


def trainer_of(
    target: Path | PreTrainedModel | TopLogitDistributions,
    draft: Path | PreTrainedModel,
    rows: Dataset,
    work: Path,
    config: DistilConfig,
    sampling: SamplingConfig = PLAIN,
) -> DistilTrainer:
    """The trainer that `distil` uses, of models or their folders."""
    models = [load_model(str(each)) if isinstance(each, Path) else each for each in (target, draft)]
    return draft_trainer(*models, rows, work, config, sampling, 0)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Bit for bit."""
    actual, expected = weights_of(ours), weights_of(theirs)
    assert actual.keys() == expected.keys()
    assert all(actual[name].equal(expected[name]) for name in expected)


def assert_trained_alike(
    ours: Path, theirs: Path, before: Path, *, most: float = float("inf")
) -> None:
    """The same training with the gradient summed in another order: by some processes, say.

    Adam moves a weight by up to the learning rate in each step, one whose gradient is all rounding,
    too, and which those are depends on the processor: so the root of the mean square difference of
    a matrix is looked at, not its largest. A step on other rollouts, a missing or a doubled one
    moves it by far more than a fiftieth of what the training did. `most` is another bound.
    """
    actual, expected, start = (weights_of(each) for each in (ours, theirs, before))
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        if weight.is_floating_point():  # not the ids of a reduced vocabulary
            moved = (weight - start[name]).square().mean().sqrt()
            difference = (actual[name] - weight).square().mean().sqrt()
            assert difference <= min(moved / 50, most), name


class GradientRecorder(TrainerCallback):
    """Keeps the gradients that the first optimizer step is about to use."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        for name, parameter in getattr(model, "draft", model).named_parameters():
            assert parameter.grad is not None
            self.gradients.setdefault(name, parameter.grad.clone())


def step_gradients(trainer: Any) -> dict[str, Tensor]:
    """Gradients of a training's only step."""
    recorder = GradientRecorder()
    trainer.add_callback(recorder)
    trainer.train()
    assert trainer.state.global_step == 1
    return recorder.gradients


def batch_gradients(trainer: DistilTrainer, count: int = 50) -> tuple[Tensor, list[Tensor]]:
    """The loss of a trainer's first batch, over `count` labels, and its gradients."""
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(count))
    trained = [each for each in trainer.model.parameters() if each.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, trained))


def assert_same_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], terms: int
) -> None:
    """Gradients of one step on the same texts are equal up to the order of the sums.

    A gradient entry is a sum of n terms, one for each token position of the batch. float32 sums of
    the same terms in two orders differ by at most 2 (n - 1) u sum|term|, with u = eps / 2 (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2), so by n eps sum|term|. The terms
    cannot be seen; the largest entry of the parameter's gradient stands for sum|term|. Rounding
    errors of either sign grow like sqrt(n) rather than n, which leaves a factor sqrt(n), about 34
    for a thousand, for terms that cancel and for the rounding within them.
    Comparing weights instead would not do: Adam divides by the gradient's own size, so an entry
    that is all rounding error still moves a weight by a whole learning rate.
    """
    tolerance = terms * torch.finfo(torch.float32).eps
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient.abs().max() > 0
        difference = (gradient - theirs[name]).abs().max() / gradient.abs().max()
        assert difference <= tolerance, (name, float(difference), tolerance)


TUNING = FinetuneConfig(epochs=1.5, max_length=256, batch_size=3, learning_rate=5e-3)


def tuned(pair: Path, out: Path, changes: dict[str, Any]) -> None:
    """Fine-tune the draft of a pair on 48 rollouts: 24 steps."""
    lora = changes.get("lora")
    finetune(
        target=pair / "target",
        draft=pair / "draft",
        rollouts=texts_of(pair, 48, seed=1),
        out=out,
        config=changed(TUNING, **changes.get("finetune", {})),
        lora=None if lora is None else LoraConfig(**lora),
        seed=0,
        save_steps=4,
    )
