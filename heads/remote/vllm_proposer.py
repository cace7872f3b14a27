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
import re
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
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class HeadProposer:
    """Drafts for each request until the head gives a rejection in it more than THRESHOLD."""

    def __init__(self, vllm_config: Any) -> None:
        where, threshold = os.environ.get("DRAFT", ""), os.environ.get("THRESHOLD", "0.7")
        if not Path(where, "config.json").is_file():
            raise ValueError(f"DRAFT must be the draft's folder, got {where!r}")
        if not re.fullmatch(r"0?\.\d+|[01](\.0*)?", threshold):
            raise ValueError(f"THRESHOLD must be a probability, such as 0.7, got {threshold!r}")
        self.threshold = float(threshold)
        self.longest = vllm_config.speculative_config.num_speculative_tokens
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        folder = Path(__file__).parent
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        module, name = settings["auto_map"]["AutoModel"].split(".")
        kind = getattr(importlib.import_module(module), name)
        self.head = kind.from_pretrained(folder, trust_remote_code=False).float().eval()
        draft = AutoModelForCausalLM.from_pretrained(where, dtype="auto", trust_remote_code=False)
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
        if asked.get("min_p"):
            warpers.append(MinPLogitsWarper(asked["min_p"]))
        self.distributions = _distributions(warpers, not greedy)
        # Of each request under way its text, without what was drafted after it, and the cache.
        self.read: list[tuple[np.ndarray[Any, Any], list[int], _CachedModel]] = []
        self.most = vllm_config.model_config.max_model_len - 1
        self._draft(np.zeros(1, dtype=np.int64), 2, [])  # a head of another draft is refused now
        self.most = min(self.most, self.read.pop()[2].positions + 1)

    def load_model(self, *_: Any) -> None:
        """Nothing is left to load."""

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
            room = min(self.longest, self.most - len(text))
            drafted.append(self._draft(text, room, former) if given and room > 0 else [])
        return drafted

    @torch.inference_mode()
    def _draft(
        self,
        text: np.ndarray[Any, Any],
        room: int,
        former: list[tuple[np.ndarray[Any, Any], list[int], _CachedModel]],
    ) -> list[int]:
        """Requests come without names: the longest text that this one continues is this one's."""
        sizes = [
            len(other) * (len(other) < len(text) and np.array_equal(other, text[: len(other)]))
            for other, _, _ in former
        ]
        if best := max(sizes, default=0):
            _, drafted, model = former.pop(sizes.index(best))
            for token, given in zip(drafted, text[best:-1].tolist(), strict=False):
                if token != given:
                    break
                best += 1
            model.crop(best)
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
        self.read.append((text, tokens, model))
        return tokens
