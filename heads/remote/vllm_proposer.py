"""Drafts for vLLM that an acceptance head ends: its `method: custom_class`.

    PYTHONPATH=HEAD DRAFT=... THRESHOLD=0.7 vllm serve TARGET --speculative-config SETTINGS

SETTINGS are {"method": "custom_class", "model": "vllm_proposer.HeadProposer",
"num_speculative_tokens": 8}, where 8 is the longest draft.

HEAD is the folder of this file, DRAFT the draft's. vLLM takes drafted tokens of this kind as
chosen, not drawn, and keeps a token y with probability p(y), so the draft's likeliest is drafted.
A head should be trained on labels of such tokens (`labels.greedy`). The text has the target's
distribution whatever the head says. The file needs vLLM, torch and transformers only.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from custom_generate.generate import (  # type: ignore[import-not-found]  # beside this file
    _CachedModel,
    _distributions,
    _PrefixAcceptance,
)
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class HeadProposer:
    """Drafts for each request until the head gives a rejection in it more than THRESHOLD.

    Args:
        vllm_config: of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        if "DRAFT" not in os.environ:
            raise ValueError("set DRAFT to the draft's folder, and THRESHOLD to the head's")
        self.threshold = float(os.environ.get("THRESHOLD", "0.7"))
        self.longest = vllm_config.speculative_config.num_speculative_tokens
        self.most = vllm_config.model_config.max_model_len
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        folder = Path(__file__).parent
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        module, name = settings["auto_map"]["AutoModel"].split(".")
        kind = getattr(importlib.import_module(module), name)
        self.head = kind.from_pretrained(folder, trust_remote_code=False).float().eval()
        draft = AutoModelForCausalLM.from_pretrained(
            os.environ["DRAFT"], dtype="auto", trust_remote_code=False
        )
        self.draft = draft.to(vllm_config.device_config.device).eval()
        self.acceptance = _PrefixAcceptance(self.head, self.draft)
        ends = draft.generation_config.eos_token_id
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        asked = self.head.config.sampling or {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        warpers, greedy = LogitsProcessorList(), asked["temperature"] == 0
        if not greedy:
            warpers.append(TemperatureLogitsWarper(float(asked["temperature"])))
        if asked["top_k"]:
            warpers.append(TopKLogitsWarper(asked["top_k"]))
        if asked["top_p"] < 1.0:
            warpers.append(TopPLogitsWarper(asked["top_p"]))
        self.distributions = _distributions(warpers, not greedy)
        self.read: list[tuple[np.ndarray[Any, Any], _CachedModel]] = []

    def load_model(self, *_: Any) -> None:
        """Nothing is left to load."""

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for every request that has just been given tokens.

        Args:
            sampled_token_ids: what each was given.
            num_tokens_no_spec: length of its text, with them.
            token_ids_cpu: (requests, longest) its text.
            slot_mappings: not read.

        Returns:
            Of each request the drafted ids, at most `num_speculative_tokens`.
        """
        former, self.read = self.read, []
        drafted: list[list[int]] = []
        for row, given in enumerate(sampled_token_ids):
            text = np.array(token_ids_cpu[row, : num_tokens_no_spec[row]])
            room = min(self.longest, self.most - 1 - len(text))
            drafted.append(self._draft(text, room, former) if given and room > 0 else [])
        return drafted

    def _draft(
        self,
        text: np.ndarray[Any, Any],
        room: int,
        former: list[tuple[np.ndarray[Any, Any], _CachedModel]],
    ) -> list[int]:
        """Requests come without names: whichever cache has read most of this text goes on."""
        common = [_common(text, read) for read, _ in former]
        if common and (best := max(common)):
            _, model = former.pop(common.index(best))
            model.crop(min(best, len(text) - 1))
        else:
            model = _CachedModel(self.draft, self.vocabulary, with_state=True)
        tokens: list[int] = []
        unread = text[model.length :].tolist()
        self.acceptance.begin()
        while len(tokens) < room:
            distribution = self.distributions(model.read(unread, 1))[0]
            unread = [int(distribution.argmax())]
            tokens += unread
            if unread[0] in self.ends:
                break
            if 1.0 - self.acceptance.after(unread[0], distribution, model.state) > self.threshold:
                break
        self.read.append((np.append(text, tokens[:-1]), model))
        return tokens


def _common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """How many first tokens two texts share."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
