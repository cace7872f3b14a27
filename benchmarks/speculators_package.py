"""The package speculators' own EAGLE-3 or P-EAGLE draft, trained on our rollouts for some seconds.

    PYTHONPATH=. PYTHON_WITH_SPECULATORS benchmarks/speculators_package.py RUN --rollouts 512 \
        --seconds 600 --out FOLDER
    draftsmith import FOLDER --target TARGET --out DRAFT

Then `benchmarks/states.py RUN --draft NAME=DRAFT` judges it with our drafts. P-EAGLE's is saved
without its masks, as an EAGLE-3 draft: of it, the first token's acceptance alone means something.
The
package's own are `TrainConfig` with all defaults but those that are options here and a layer of
Llama's kind, the model, its loss, vocabulary and data loading, and `Trainer.train_epoch` with its
optimizers. Ours is what it has for GPUs alone: attention document by document instead of flex
attention, KL with a closed gradient, and float32 in Muon's products. The linear schedule ends with
the seconds, which are the processor's, of training.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import speculators.models.eagle3.core as core
import speculators.models.peagle.core as peagle
import torch
import torch.optim._muon as muon
from speculators.losses import utils as losses
from speculators.model import SpeculatorModel
from speculators.models.attention import ALL_ATTENTION_FUNCTIONS
from speculators.models.eagle3.data import shift_batch
from speculators.train import cli
from speculators.train import trainer as training
from speculators.train.config import TrainConfig
from speculators.train.data import BaseDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    save_token_frequency_distribution,
)
from torch import Tensor

from specdata.storage.dataset import load_stored, of_split, read_manifest


class Rollouts(BaseDataset):
    """Our rows as the package's dataset, without the last tokens, which the target did not read."""

    def __init__(self, rows: Any, taps: list[int], size: int, longest: int) -> None:
        self.rows = []
        for row in rows:
            ids = torch.tensor(row["prompt_ids"] + row["completion_ids"])
            stored = torch.frombuffer(bytearray(row["target_taps"]), dtype=torch.float16)
            each = stored.view(-1, len(row["taps"]), size + 2)[: len(ids) - 1]
            each = each[:, [row["taps"].index(tap) for tap in taps]]
            states = each[..., :size] * each[..., size:].contiguous().view(torch.float32)
            learnt = torch.arange(len(ids)) >= len(row["prompt_ids"])
            self.rows.append((ids, learnt, states))
        super().__init__(longest, torch.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def _compute_approx_lengths(self) -> list[int]:
        return [len(ids) - 1 for ids, _, _ in self.rows]

    def _get_raw_data(self, index: int) -> dict[str, Tensor]:
        ids, learnt, states = self.rows[index]
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": ids[:-1],
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": learnt[:-1],
        }


class Documents:
    """The places of each document of a pack, and what is added to their scores."""

    def __init__(self, allowed: Any, documents: Tensor) -> None:
        none = torch.zeros((), dtype=torch.long)
        self.places, self.added = list[Tensor](), list[Tensor]()
        for document in documents.unique().tolist():
            if document >= 0:  # the rest is padding
                at = (documents == document).nonzero()[:, 0]
                seen = allowed(none, none, at[:, None], at[None])
                self.places.append(at)
                self.added.append(torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")))


def by_document(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Documents,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Flex attention's result; of the keys of later steps each token sees its own alone."""
    heads, length, size = query.shape[1:]
    groups = key.shape[1]
    query = query.view(groups, heads // groups, length, size) * scaling
    keys, values = key[0].split(length, dim=1), value[0].split(length, dim=1)
    read = []
    for at, added in zip(mask.places, mask.added, strict=True):
        q = query[:, :, at]
        own = [(q * each[:, None, at]).sum(-1, keepdim=True) for each in keys[1:]]
        p = torch.cat([q @ keys[0][:, None, at].mT + added, *own], dim=-1).softmax(-1)
        out = p[..., : len(at)] @ values[0][:, None, at]
        for step, each in enumerate(values[1:]):
            out = out + p[..., len(at) + step, None] * each[:, None, at]
        read.append(out)
    everywhere = torch.zeros_like(query)
    everywhere = everywhere.index_copy(2, torch.cat(mask.places), torch.cat(read, dim=2))
    return everywhere.reshape(1, heads, length, size).transpose(1, 2).contiguous(), None


class _Divergence(torch.autograd.Function):
    """KL(target || draft), whose gradient is the difference of the distributions."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_q, log_p = logits.log_softmax(-1), targets.log_softmax(-1)
        p = log_p.exp()
        value = (p * (log_p - log_q)).sum(-1)
        ctx.save_for_backward(log_q.exp_().sub_(p))
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (difference,) = ctx.saved_tensors
        return difference * grad[..., None], None


class Wide:
    """A gradient that Muon's products are not to round."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grad, name)

    def bfloat16(self) -> Tensor:
        """It, in float32."""
        return self.grad.float().clone()


def install() -> None:
    """Give the package what a CPU can run."""
    make_mask, extend = core.create_combined_mask_mod, core.extend_dense_mask_for_draft_tokens

    def with_documents(document_ids: Tensor, *args: Any, **options: Any) -> Any:
        allowed = make_mask(document_ids, *args, **options)
        allowed.documents = document_ids
        return allowed

    def extended(mask: Any, length: int) -> Any:
        return mask if isinstance(mask, Documents) else extend(mask, length)

    make_peagle_mask = peagle.create_peagle_mask_mod

    def with_anchors(anchor_pos: Tensor, document_ids: Tensor, **options: Any) -> Any:
        allowed = make_peagle_mask(anchor_pos, document_ids=document_ids, **options)
        allowed.documents = document_ids[anchor_pos]
        return allowed

    ALL_ATTENTION_FUNCTIONS.register("documents", by_document)
    peagle.create_peagle_mask_mod = with_anchors
    core.create_combined_mask_mod = with_documents
    core.extend_dense_mask_for_draft_tokens = extended
    losses._EAGER_LOSS_FN_MAP["kl_div"] = _Divergence.apply
    orthogonal = muon._zeropower_via_newtonschulz
    muon._zeropower_via_newtonschulz = lambda grad, *rest: orthogonal(Wide(grad), *rest)  # type: ignore[arg-type]
    training._StepTimer.reset = lambda self, _enabled: setattr(self, "enabled", False)


class OutOfTimeError(Exception):
    """The seconds are over."""


class ClockedTrainer(Trainer):
    """The package's, on a CPU; the share of the schedule that is done is that of the seconds."""

    def setup_model(self) -> None:
        """Nothing goes to a GPU."""
        SpeculatorModel.verify_training_compatible(self.model)
        self.local_rank, self.device_type, self.rank = "cpu", "cpu", 1  # 1 shows no progress

    def begin(self, seconds: float) -> None:
        """Start the clock."""
        self.seconds, self.begun = seconds, time.process_time()
        self._set_rate(1, 1000.0)

    def _set_rate(self, step: int, total: float) -> None:
        warmup = int(total) // 100
        share = step / warmup if step < warmup else max(0.0, 1 - (step - warmup) / (total - warmup))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * share

    def _schedulers_step(self) -> None:
        done = self.global_step + 1
        spent = time.process_time() - self.begun
        self._set_rate(done, max(done + 1.0, self.seconds * done / spent))

    def after_step(self) -> None:
        """End at the first step after the last second."""
        if time.process_time() - self.begun > self.seconds:
            raise OutOfTimeError


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run", type=Path, help="output of a run whose rollouts are made, with their taps")
    add("--kind", default="eagle3", choices=["eagle3", "peagle"])
    add("--rollouts", type=int, default=512)
    add("--seconds", type=float, required=True)
    add("--lr", default="1e-3", help="1e-3 is the package's")
    add("--optimizer", default="muon", choices=["muon", "adamw"], help="muon is the package's")
    add("--tokens", default="8192", help="of a batch; 8192 is the package's")
    add("--vocabulary", type=int, default=8192)
    add("--seed", default="0")
    add("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = given.run / "rollouts"
    target = read_manifest(folder)["settings"]["target"]["name"]
    train = of_split(load_stored(folder), "train", folder)
    in_order = sorted(range(len(train)), key=train["dataset"].__getitem__)  # evenly of each set
    count = given.rollouts
    rows = train.select([in_order[index * len(train) // count] for index in range(count)])
    *taps, final = rows[0]["taps"]
    flags = ["--speculator-type", given.kind, "--verifier-name-or-path", target]
    flags += ["--draft-vocab-size", str(given.vocabulary), "--hidden-states-dtype", "float32"]
    flags += ["--total-seq-len", given.tokens, "--loss-implementation", "eager"]
    flags += ["--draft-attn-impl", "eager", "--num-workers", "0", "--seed", given.seed]
    flags += ["--lr", given.lr, "--optimizer", given.optimizer, "--draft-arch", "llama"]
    flags += ["--target-layer-ids", *map(str, taps)]
    settings = argparse.Namespace(**TrainConfig.resolve(flags).flatten())
    settings.draft_attn_impl = "documents"
    cli.set_seed(settings.seed)
    numbers = len(rows[0]["prompt_ids"]) + len(rows[0]["completion_ids"]) - 1
    size = len(rows[0]["target_taps"]) // 2 // numbers // len(rows[0]["taps"]) - 2
    data = Rollouts(rows, [*taps, final], size, settings.total_seq_len)
    with tempfile.TemporaryDirectory() as scratch:
        counted = [{"input_ids": ids, "loss_mask": learnt} for ids, learnt, _ in data.rows]
        save_token_frequency_distribution(counted, Path(scratch) / "frequencies.pt")
        frequencies = torch.load(Path(scratch) / "frequencies.pt", weights_only=True)
        tokens = cli.get_target_vocab_size(None, target)
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, given.vocabulary, tokens)
        kind = SpeculatorModel.registry[given.kind]
        model = cli.build_draft_model(settings, kind, t2d, d2t, given.vocabulary)
        model._create_mask_fn = lambda allowed, **_: Documents(allowed, allowed.documents)
        batches = _setup_dataloader(
            data,
            settings.total_seq_len,
            size,
            num_workers=0,
            num_target_layers=len(taps),
            preprocess=shift_batch,
            seed=settings.seed,
        )
        call, _ = kind.get_trainer_kwargs(**vars(settings))
        given_names = [name for name in TrainerConfig._fields if hasattr(settings, name)]
        trainer_settings = {name: getattr(settings, name) for name in given_names}
        trainer_settings |= {"num_epochs": settings.epochs, "save_path": scratch}
        trainer_settings |= {"train_call_kwargs": call, "hidden_states_dtype": torch.float32}
        trainer = ClockedTrainer(model, TrainerConfig(**trainer_settings), batches)
        trainer.begin(given.seconds)
        try:
            for epoch in range(10**6):
                trainer.train_epoch(epoch, step_callback=trainer.after_step)
        except OutOfTimeError:
            pass
    spent, steps = time.process_time() - trainer.begun, trainer.global_step
    if given.kind == "peagle":
        del model.mask_hidden
    model.save_pretrained(given.out)
    done = {"steps": steps, "epochs": round(steps / len(batches), 2), "seconds": round(spent, 1)}
    print(json.dumps(vars(given) | {"run": str(given.run), "out": str(given.out)} | done))


if __name__ == "__main__":
    install()
    main()
