"""Acceptance heads: what all kinds share, SpecDec++'s, and two without its lag."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads.config import DEFAULT_FEATURES, Kind
from heads.inputs import FEATURES, DraftedTokens
from heads.remote import auto_config, write_custom_generate, write_modeling
from specdata.sampling import SamplingConfig
from specdata.storage.files import atomic_write, write_json
from specdata.storage.resume import read_record


class BaseHead(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="draftsmith",
    tags=["speculative-decoding", "acceptance-head"],
):
    """A network that predicts whether the target accepts a drafted token.

    Constructor arguments are the saved `config.json`; weights are safetensors only. A saved folder
    also carries what transformers needs to use the head without this project (`heads.remote`).
    Parameters and arithmetic are float32 whatever the draft's precision.

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

    kind: ClassVar[Kind]
    lag: ClassVar[int]
    reads: tuple[str, ...]
    rejection_weight: float

    def __init__(
        self,
        hidden_size: int,
        depth: int,
        draft: str | None,
        sampling: dict[str, Any] | None,
        probe: Sequence[float] | None,
        rejection_weight: float = 1.0,
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

    @property
    def sampling_config(self) -> SamplingConfig:
        """The distribution under which its labels were made; the default one if not recorded."""
        return SamplingConfig(**(self.sampling or {}))

    def logits(self, drafted: DraftedTokens) -> Tensor:
        """Return the raw acceptance logits of drafted tokens (...).

        Their sigmoid, which SpecDec++ compares with its threshold, is biased by a weighted loss.
        """
        raise NotImplementedError

    def probability(self, drafted: DraftedTokens) -> Tensor:
        """Return the calibrated acceptance probability, the bias of the weighted loss undone.

        With phat = sigmoid(logit), this is w phat / (1 - phat + w phat) = sigmoid(logit + log w).
        """
        return torch.sigmoid(self.logits(drafted) + math.log(self.rejection_weight))

    def _check_width(self, name: str, vectors: Tensor, width: int) -> None:
        if vectors.shape[-1] != width:
            raise ValueError(
                f"this head reads {name} of width {width}, got {vectors.shape[-1]}; it was trained "
                f"for the draft {self.draft or '(not recorded)'}"
            )

    def _save_pretrained(self, save_directory: Path) -> None:
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        with atomic_write(save_directory / SAFETENSORS_SINGLE_FILE) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        settings = self._hub_mixin_config
        assert isinstance(settings, dict)
        write_modeling(save_directory)
        write_custom_generate(save_directory)
        # Last, because loading starts with it: the folder is a head or it is none.
        about = {"kind": self.kind, **settings, **auto_config(self.kind)}
        write_json(save_directory / CONFIG_NAME, about)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *, map_location: str = "cpu", **hub: Any
    ) -> BaseHead:
        """Load a head of any kind from a local folder or from the Hub, in evaluation mode.

        Args:
            pretrained_model_name_or_path: a folder written by `save_pretrained`, or a Hub id.
            map_location: the device.
            **hub: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` as
                everywhere in the Hub library.

        Raises:
            ValueError: if there is no head there, or what is there is something else.
        """
        source = str(pretrained_model_name_or_path)
        folder = Path(source)
        if (is_here := folder.is_dir()) and not (folder / CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds no acceptance head: it has no {CONFIG_NAME}; "
                "pass a folder written by AcceptanceHead.save_pretrained"
            )

        def file(name: str) -> Path:
            return folder / name if is_here else Path(hf_hub_download(source, name, **hub))

        try:
            settings = read_record(file(CONFIG_NAME), (), "restore it")
            kind = settings.get("kind")
            if not isinstance(kind, str) or kind not in KINDS:
                raise ValueError(
                    f"{source} is not an acceptance head that is known here: the kind in its "
                    f"{CONFIG_NAME} must be one of {', '.join(KINDS)}, got {kind!r}"
                )
            actual = cls if issubclass(cls, KINDS[kind]) else KINDS[kind]
            names = actual._hub_mixin_init_parameters.keys() & settings.keys()
            head = actual(**{name: settings[name] for name in names})
            head.load_state_dict(load_file(file(SAFETENSORS_SINGLE_FILE)))
        except TypeError as error:
            raise ValueError(
                f"{source} is not an acceptance head: a setting in its {CONFIG_NAME} is missing or "
                f"of another type ({error})"
            ) from error
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"the weights of {source} do not fit the head that its {CONFIG_NAME} describes: "
                f"{error}"
            ) from error
        except (HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError) as error:
            raise ValueError(
                f"no acceptance head at {source!r}: it is neither a folder here nor a Hub "
                f"repository that can be reached ({type(error).__name__}: {error})"
            ) from error
        return head.to(map_location).eval()


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

    blocks: nn.ModuleList
    output: nn.Linear

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


class AcceptanceHead(StateHead, paper_url="https://arxiv.org/abs/2405.19715"):
    """Predict whether the target accepts a drafted token (SpecDec++, Huang et al., 2405.19715).

    A residual network on the draft's last hidden state, the one that its output embedding reads,
    at the position of the drafted token after the draft consumed it. The blocks do not share
    weights.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases the raw output to
            a/(a + w(1 - a)); `probability` undoes that. 1 means no bias.
    """

    kind: ClassVar[Kind] = "specdec++"
    lag: ClassVar[int] = 1
    reads = ("hidden",)

    def __init__(
        self,
        *,
        hidden_size: int,
        depth: int = 3,
        rejection_weight: float = 1.0,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        super().__init__(hidden_size, depth, draft, sampling, probe, rejection_weight)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size, 1)

    def logits(self, drafted: DraftedTokens) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`."""
        logits: Tensor = self(drafted.after())
        return logits


class ImmediateHead(BaseHead):
    """Predict whether the target accepts a drafted token, from what is known once it is drawn.

    So it costs no forward of the draft and, unlike SpecDec++'s head, has no lag. Each vector
    feature goes through its own linear map, the standardised numbers through one; ReLU layers
    follow their sum. So what a token adds is a row of a table, and one small matrix reads the rest:
    `heads.judge` asks in microseconds. A norm, or a further layer, costs more than it predicts.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        embedding_size: E, the width of the draft's input embedding; 0 means H.
        reads: names of features in `heads.inputs.FEATURES`.
        scales: number feature -> (mean, standard deviation) by which it is standardised; vector ->
            (0, root mean square of its values); (0, 1) for those that are missing.
    """

    kind: ClassVar[Kind] = "immediate"
    lag: ClassVar[int] = 0
    number_means: Tensor
    number_deviations: Tensor

    def __init__(
        self,
        *,
        hidden_size: int,
        embedding_size: int = 0,
        reads: Sequence[str] = DEFAULT_FEATURES,
        width: int = 64,
        depth: int = 0,
        scales: Mapping[str, Sequence[float]] | None = None,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        if embedding_size < 0 or width < 1:
            raise ValueError(
                f"a head needs embedding_size >= 0 and width >= 1, got {embedding_size} and {width}"
            )
        if unknown := [name for name in reads if name not in FEATURES]:
            raise ValueError(f"unknown features {', '.join(unknown)}: known are {[*FEATURES]}")
        super().__init__(hidden_size, depth, draft, sampling, probe)
        self.embedding_size = embedding_size or hidden_size
        self.reads = tuple(reads)
        self.width = width
        self.scales = self._checked(scales or {})
        widths = {"hidden": self.hidden_size, "embedding": self.embedding_size}
        self.sizes = {
            name: widths[FEATURES[name].shape]
            for name in self.reads
            if FEATURES[name].shape in widths
        }
        self.numbers = tuple(name for name in self.reads if name not in self.sizes)
        self.vectors = nn.ModuleDict(
            {name: nn.Linear(size, width, bias=False) for name, size in self.sizes.items()}
        )
        if self.numbers:  # weights that nothing reads would never get a gradient
            self.number_weights = nn.Linear(len(self.numbers), width, bias=False)
        for buffer, place in (("number_means", 0), ("number_deviations", 1)):
            values = torch.tensor([self.scales[name][place] for name in self.numbers])
            self.register_buffer(buffer, values, persistent=False)
        self.bias = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.output = nn.Linear(width, 1)

    def _checked(self, scales: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
        checked = {}
        for name in self.reads:
            mean, deviation = scales.get(name, (0.0, 1.0))
            if not (math.isfinite(mean) and 0.0 < deviation < math.inf):
                raise ValueError(
                    f"scales must give a finite mean and a positive standard deviation of {name}, "
                    f"got {mean} and {deviation}"
                )
            checked[name] = (float(mean), float(deviation))
        return checked

    def forward(self, *features: Tensor) -> Tensor:
        """Return (...) raw acceptance logits of features, (...) or (..., size), in `reads`'s order.

        Raises ValueError if a vector has another width than the draft's.
        """
        given = dict(zip(self.reads, features, strict=True))
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(features[0].device.type, enabled=False):
            x: Tensor = self.bias
            for name, layer in self.vectors.items():
                self._check_width(name, given[name], self.sizes[name])
                x = x + layer(given[name].to(x.dtype) / self.scales[name][1])
            if self.numbers:
                numbers = torch.stack([given[name].to(x.dtype) for name in self.numbers], dim=-1)
                standardised = (numbers - self.number_means) / self.number_deviations
                x = x + self.number_weights(standardised)
            for layer in self.layers:
                x = layer(x.relu())
            logits: Tensor = self.output(x.relu())
        return logits.squeeze(-1)

    def logits(self, drafted: DraftedTokens) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`."""
        logits: Tensor = self(*(FEATURES[name].compute(drafted) for name in self.reads))
        return logits


class ConfidenceHead(StateHead, paper_url="https://arxiv.org/abs/2607.05147"):
    """Predict whether the target accepts a drafted token, by one linear map of the state before it.

    That is the form of DSpark's (2607.05147), whose states are [h ; markov_w1[token before]], and
    the one head that engines ask. It sees neither the token nor its distribution.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        rejection_weight: as of `AcceptanceHead`.
    """

    kind: ClassVar[Kind] = "confidence"
    lag: ClassVar[int] = 0
    reads = ("hidden_before",)

    def __init__(
        self,
        *,
        hidden_size: int,
        rejection_weight: float = 1.0,
        draft: str | None = None,
        sampling: dict[str, Any] | None = None,
        probe: Sequence[float] | None = None,
    ) -> None:
        super().__init__(hidden_size, 0, draft, sampling, probe, rejection_weight)
        self.blocks = nn.ModuleList()
        self.output = nn.Linear(hidden_size, 1)

    def logits(self, drafted: DraftedTokens) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`."""
        logits: Tensor = self(drafted.before())
        return logits


KINDS: dict[str, type[BaseHead]] = {
    head.kind: head for head in (AcceptanceHead, ImmediateHead, ConfidenceHead)
}
"""Every kind of head by its name in config.json."""
