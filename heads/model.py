"""Acceptance heads: what every kind shares, and SpecDec++'s, published as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads.inputs import DecisionPoint, HeadInputs
from heads.remote import auto_config, write_custom_generate, write_modeling
from specdata.sampling import SamplingConfig
from specdata.storage.files import atomic_write, read_object, write_json
from specdata.storage.resume import read_record

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


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
        reads: names of the features in `heads.inputs.FEATURES` that it reads.
        decision_points: what may be known of a token when the head is asked about it, in order.
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks.
        rejection_weight: weight of rejections in the training loss; 1 means no bias.
        draft: name or path of the draft whose hidden states the head reads; None if not recorded.
        sampling: temperature, top_k and top_p under which its labels were made.
        probe: values of that draft's hidden states, by which another one is recognised
            (`heads.probe`); None if not recorded.
    """

    kind: ClassVar[str]
    reads: tuple[str, ...]
    decision_points: tuple[DecisionPoint, ...]
    hidden_size: int
    depth: int
    rejection_weight: float
    draft: str | None
    sampling: dict[str, Any] | None
    probe: Sequence[float] | None

    @property
    def sampling_config(self) -> SamplingConfig:
        """The distribution under which its labels were made; the default one if not recorded."""
        return SamplingConfig(**(self.sampling or {}))

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Return the raw acceptance logits of drafted tokens.

        Their sigmoid, which SpecDec++ compares with its threshold, is biased by a weighted loss.

        Args:
            inputs: the features in `reads` that are known at `inputs.point`, which is one of
                `decision_points`; leading shape (...).

        Returns:
            (...) logits.
        """
        raise NotImplementedError

    def probability(self, inputs: HeadInputs) -> Tensor:
        """Return the calibrated acceptance probability, the bias of the weighted loss undone.

        With phat = sigmoid(logit), this is w phat / (1 - phat + w phat) = sigmoid(logit + log w).

        Args:
            inputs: as for `logits`.

        Returns:
            (...) probabilities.
        """
        return torch.sigmoid(self.logits(inputs) + math.log(self.rejection_weight))

    def _save_pretrained(self, save_directory: Path) -> None:
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        with atomic_write(save_directory / SAFETENSORS_SINGLE_FILE) as temporary:
            save_file(weights, temporary, metadata={"format": "pt"})
        settings = self._hub_mixin_config
        assert isinstance(settings, dict)
        write_modeling(save_directory, self.kind)
        write_custom_generate(save_directory)
        # Last, because loading starts with it: the folder is a head or it is none.
        about = {"kind": self.kind, **settings, **auto_config(self.kind)}
        write_json(save_directory / CONFIG_NAME, about)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> BaseHead:
        """Load a head of any kind from a local folder or from the Hub, in evaluation mode.

        Args:
            pretrained_model_name_or_path: a folder written by `save_pretrained`, or a Hub id.
            **options: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`
                as everywhere in the Hub library, and `map_location` for the device.

        Returns:
            A head of the kind that its `config.json` names.

        Raises:
            ValueError: if there is no head there, or what is there is something else.
        """
        source = pretrained_model_name_or_path
        folder = Path(source)
        if folder.is_dir() and not (folder / CONFIG_NAME).is_file():
            raise ValueError(
                f"{folder} holds no acceptance head: it has no {CONFIG_NAME}; "
                "pass a folder written by AcceptanceHead.save_pretrained"
            )
        if folder.is_dir():  # the library's own refusal would not name the file
            read_record(folder / CONFIG_NAME, (), "restore it")
        try:
            path = folder / CONFIG_NAME
            if not folder.is_dir():
                hub = {name: options[name] for name in HUB_OPTIONS if name in options}
                path = Path(hf_hub_download(str(source), CONFIG_NAME, **hub))
            kind = read_object(path).get("kind")
            kinds = _kinds()
            if not isinstance(kind, str) or kind not in kinds:
                raise ValueError(
                    f"{source} is not an acceptance head that is known here: the kind in its "
                    f"{CONFIG_NAME} must be one of {', '.join(kinds)}, got {kind!r}"
                )
            actual = cls if issubclass(cls, kinds[kind]) else kinds[kind]
            head: BaseHead = super(BaseHead, actual).from_pretrained(source, **options)
        except (HFValidationError, HfHubHTTPError, EntryNotFoundError, OSError) as error:
            raise ValueError(
                f"no acceptance head at {str(source)!r}: it is neither a folder here nor a Hub "
                f"repository that can be reached ({type(error).__name__}: {error})"
            ) from error
        return head

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        map_location: str = "cpu",
        **settings: Any,
    ) -> BaseHead:
        if not {"hidden_size", "depth"} <= settings.keys():
            raise ValueError(
                f"{model_id} is not an acceptance head: its {CONFIG_NAME} must give hidden_size "
                f"and depth, it gives {sorted(settings)} of a head's settings"
            )
        try:
            head = cls(**settings)
        except TypeError as error:
            raise ValueError(
                f"{model_id} is not an acceptance head: a setting in its {CONFIG_NAME} is of "
                f"another type ({error})"
            ) from error
        path = Path(model_id) / SAFETENSORS_SINGLE_FILE
        if not Path(model_id).is_dir():
            path = Path(
                hf_hub_download(
                    repo_id=model_id,
                    filename=SAFETENSORS_SINGLE_FILE,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                )
            )
        try:
            head.load_state_dict(load_file(path))
        except (RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"the weights in {path} do not fit the head that {CONFIG_NAME} describes: {error}"
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


class AcceptanceHead(BaseHead, paper_url="https://arxiv.org/abs/2405.19715"):
    """Predict whether the target accepts a drafted token (SpecDec++, Huang et al., 2405.19715).

    A residual network on the draft's last hidden state, the one that its output embedding reads,
    at the position of the drafted token after the draft consumed it. The blocks do not share
    weights.

    Attributes:
        reads: names of the features in `heads.inputs.FEATURES` that `forward` takes, in its order.

    Args:
        hidden_size: H, the width of the draft's hidden state.
        depth: number of residual blocks before the linear layer; 0 is a linear head.
        rejection_weight: weight w of rejections in the training loss. It biases the raw output to
            a/(a + w(1 - a)); `probability` undoes that. 1 means no bias.
        draft: name or path of the draft whose hidden states the head reads.
        sampling: temperature, top_k and top_p under which its labels were made.
        probe: values of that draft's hidden states; see `heads.probe`.

    Raises:
        ValueError: if a size is out of range.
    """

    kind: ClassVar[str] = "specdec++"
    reads = ("hidden",)
    decision_points = (DecisionPoint.CONSUMED,)

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
        if hidden_size < 1 or depth < 0:
            raise ValueError(
                f"a head needs hidden_size >= 1 and depth >= 0, got {hidden_size} and {depth}"
            )
        if not 0.0 < rejection_weight < math.inf:
            raise ValueError(f"rejection_weight must be positive, got {rejection_weight}")
        super().__init__()
        self.hidden_size = hidden_size
        self.depth = depth
        self.rejection_weight = rejection_weight
        self.draft = draft
        self.sampling = sampling
        self.probe = probe
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(depth))
        self.output = nn.Linear(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the raw acceptance logit of the token just consumed.

        Args:
            hidden: (..., H), any float type.

        Returns:
            (...) logits in the precision of the parameters, float32 unless the head was converted.

        Raises:
            ValueError: if the last dimension is not H.
        """
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"this head reads hidden states of width {self.hidden_size}, got {hidden.shape[-1]}"
                f"; it was trained for the draft {self.draft or '(not recorded)'}"
            )
        # Autocast would quietly run the layers in half precision.
        with torch.autocast(hidden.device.type, enabled=False):
            state = hidden.to(self.output.weight.dtype)
            for block in self.blocks:
                state = block(state)
            logits: Tensor = self.output(state)
        return logits.squeeze(-1)

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Return the raw acceptance logits of drafted tokens; see `BaseHead.logits`."""
        logits: Tensor = self(*(inputs[name] for name in self.reads))
        return logits


def _kinds() -> dict[str, type[BaseHead]]:
    """Every kind of head by its name in config.json."""
    from heads.immediate import ImmediateHead  # which imports this file

    return {head.kind: head for head in (AcceptanceHead, ImmediateHead)}
