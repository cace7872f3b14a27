"""What acceptance heads of all kinds share: saving, loading, and asking about one drafted token.

Each kind is one file of `heads/kinds`. A saved head carries that file, this one and
`heads/inputs.py`, and there `AutoModel` makes the class that is used here. So these files import
nothing but torch, transformers and what comes with them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from json import JSONDecodeError
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from heads.inputs import DraftedTokens, DrawnToken, captured_state, feature_of, under_way

# What AutoModel adds to the arguments of `from_pretrained`.
OF_AUTO_MODEL = {"config", "trust_remote_code", "adapter_kwargs", "_from_auto"}
UNREADABLE = (
    *(JSONDecodeError, UnicodeDecodeError, TypeError, RuntimeError, SafetensorError),
    *(HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError),
)
"""Of files that are missing, damaged, or of other sizes than config.json says."""


class SavedHeadConfig(PretrainedConfig):  # type: ignore[misc]
    """A head's config.json, as AutoModel reads it."""

    model_type = "acceptance_head"


class Judge(Protocol):
    """Asks a head about the tokens of a draft under way, for raw acceptance logits."""

    def logit(self, drawn: DrawnToken) -> float:
        """Judge the newest token that can be once `drawn` is: itself, or one before it."""


class BaseHead(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="draftsmith",
    tags=["speculative-decoding", "acceptance-head"],
):
    """A network that predicts whether the target accepts a drafted token.

    Constructor arguments are the saved `config.json`; weights are safetensors only. Parameters and
    arithmetic are float32 whatever the draft's precision.

    Attributes:
        kind: what configuration and `config.json` call this kind of head.
        lag: tokens that must be drawn after a token before the head can judge it.
        reads: names of what it reads of a token.
        rejection_weight: weight of rejections in the training loss; 1 means no bias.
        draft: name or path of the draft whose hidden states the head reads; None if not recorded.
        sampling: temperature, top_k, top_p and min_p under which its labels were made.
        probe: values of that draft's hidden states, by which another one is recognised
            (`heads.probe`); None if not recorded.
    """

    kind: ClassVar[str] = ""
    lag: ClassVar[int] = 0
    reads: tuple[str, ...]

    def __init__(
        self,
        hidden_size: int,
        *,
        depth: int = 0,
        rejection_weight: float = 1.0,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        if hidden_size < 1 or depth < 0:
            raise ValueError(
                f"a head needs hidden_size >= 1 and depth >= 0, got {hidden_size} and {depth}"
            )
        if not 0.0 < rejection_weight < math.inf:
            raise ValueError(f"rejection_weight must be positive, got {rejection_weight}")
        super().__init__()
        self.hidden_size = hidden_size
        self.depth = depth
        self.draft = draft
        self.sampling = sampling
        self.probe = probe
        self.rejection_weight = rejection_weight

    @classmethod
    def settings(cls) -> set[str]:
        """The names of the constructor's arguments."""
        return {*inspect.signature(cls.__init__).parameters, "draft", "sampling", "probe"}

    def logits(self, drafted: DraftedTokens) -> Tensor:
        """Return the raw acceptance logits of drafted tokens (...).

        Their sigmoid, which SpecDec++ compares with its threshold, is biased by a weighted loss.
        A kind's `forward` makes them of what it `reads`, in that order.
        """
        logits: Tensor = self(*(feature_of(name, drafted) for name in self.reads))
        return logits

    def probability(self, drafted: DraftedTokens) -> Tensor:
        """Return the calibrated acceptance probability, the bias of the weighted loss undone.

        With phat = sigmoid(logit), this is w phat / (1 - phat + w phat) = sigmoid(logit + log w).
        """
        return torch.sigmoid(self.logits(drafted) + math.log(self.rejection_weight))

    @torch.inference_mode()
    def logit_on_device(self, drawn: DrawnToken) -> Tensor:
        """The raw logit (), of the newest token that can be judged once `drawn` is."""
        drafted = under_way(drawn)
        # What a token is drawn from is the state after the one before it.
        return self.logits(replace(drafted, after=drafted.before) if self.lag else drafted)

    def logit(self, drawn: DrawnToken) -> float:
        """See `Judge.logit`."""
        return float(self.logit_on_device(drawn))

    def judge(self) -> Judge:
        """The fastest judge of this head, with its weights as they are now.

        A small draft takes half a millisecond a token on a CPU, where a head as torch modules takes
        a third of that. So kinds have judges that run the fewest operations that give the same
        logits, and operations that drafting has just run: after a forward every other call costs
        its cache misses, a few microseconds each (in numpy twice as many).
        """
        return self

    def for_engines(self) -> tuple[Tensor, Tensor] | None:
        """The weight (1, H) and bias (1,) on the state that engines ask, if it is such a head.

        The sigmoid of that linear map is the calibrated acceptance probability.
        """
        return None

    def _is_fast(self) -> bool:
        """True if it is on a CPU, and of just its kind's class: others may compute anything."""
        return "kind" in vars(type(self)) and next(self.parameters()).device.type == "cpu"

    def _check_width(self, name: str, vectors: Tensor, width: int) -> None:
        if vectors.shape[-1] != width:
            raise ValueError(
                f"this head reads {name} of width {width}, got {vectors.shape[-1]}; it was trained "
                f"for the draft {self.draft or '(not recorded)'}"
            )

    def _save_pretrained(self, save_directory: Path) -> None:
        # By name: what writes a folder is not carried by it.
        import_module("heads.published").save_head(self, self._hub_mixin_config, save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoModel") -> None:
        """Do nothing when AutoModel calls it: a saved head carries its code anyway."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> BaseHead:
        """Load a head of any kind from a local folder or from the Hub, in evaluation mode.

        A published folder has the code of its own kind alone.

        Args:
            pretrained_model_name_or_path: a folder written by `save_pretrained`, or a Hub id.
            **options: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` as
                everywhere in the Hub library.

        Raises:
            ValueError: if there is no head there, or what is there is something else.
        """
        source = str(pretrained_model_name_or_path)
        hub = {name: value for name, value in options.items() if name not in OF_AUTO_MODEL}
        folder = Path(source)

        def file(name: str) -> Path:
            is_here = folder.is_dir()
            return folder / name if is_here else Path(hf_hub_download(source, name, **hub))

        try:
            settings = json.loads(file(CONFIG_NAME).read_text(encoding="utf-8"))
            if not isinstance(settings, dict):
                raise TypeError(f"{CONFIG_NAME} holds {settings!r}")
            kind = settings.get("kind")
            actual = cls if kind and kind == cls.kind else _class_of(kind, source)
            head = actual(**{n: value for n, value in settings.items() if n in actual.settings()})
            head.load_state_dict(load_file(file(SAFETENSORS_SINGLE_FILE)))
        except UNREADABLE as error:
            raise ValueError(
                f"no acceptance head at {source!r}, which must be a folder that save_pretrained "
                f"wrote or a Hub id that can be reached ({type(error).__name__}: {error})"
            ) from error
        return head.eval()


def _class_of(kind: object, source: str) -> type[BaseHead]:
    classes: list[type[BaseHead]] = [BaseHead]
    for each in classes:  # which grows: `heads.kinds` has them all, a published folder has one
        classes += each.__subclasses__()
    kinds = {each.kind: each for each in classes if vars(each).get("kind")}
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            f"{source} is not an acceptance head that is known here: the kind in its {CONFIG_NAME} "
            f"must be one of {', '.join(kinds)}, got {kind!r}"
        )
    return kinds[kind]


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x)): (..., H) -> (..., H)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the block to (..., H)."""
        return hidden + nn.functional.silu(self.linear(hidden))


class StateHead(BaseHead):
    """A head of one state of the draft: residual blocks, if any, and a linear layer."""

    def __init__(self, hidden_size: int, depth: int, **about: Any) -> None:
        super().__init__(hidden_size, depth=depth, **about)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the raw acceptance logit that a state gives: (..., H) -> (...).

        In the precision of the parameters, float32 unless the head was converted. Raises ValueError
        if the last dimension is not H.
        """
        self._check_width("hidden states", hidden, self.hidden_size)
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            state = hidden.to(self.output.weight.dtype)
            for block in self.blocks:
                state = block(state)
            logits: Tensor = self.output(state)
        return logits.squeeze(-1)

    def judge(self) -> Judge:
        """See `BaseHead.judge`."""
        return StateJudge(self) if self._is_fast() else self


class StateJudge:
    """Asks a `StateHead` on a CPU; its weights are copied."""

    @torch.no_grad()
    def __init__(self, head: StateHead) -> None:
        self._blocks = [copied(cast(ResidualBlock, block).linear) for block in head.blocks]
        self._output, self._bias = head.output.weight[0].clone(), float(head.output.bias)

    def logit(self, drawn: DrawnToken) -> float:
        """See `Judge.logit`: by the state that this token is drawn from."""
        x = captured_state(drawn).to(self._output.dtype)
        for weight, bias in self._blocks:
            x = nn.functional.silu(torch.addmv(bias, weight, x)).add_(x)
        return float(x.dot(self._output)) + self._bias


def copied(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Copies of the weights (out, in) and bias (out,) of a layer."""
    return layer.weight.clone(), layer.bias.clone()
