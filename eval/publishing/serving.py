"""Settings of a draft for engines: their command lines.

Options are those of vLLM 0.28 to main of September 2026 (`vllm/config/speculative.py`), SGLang main
of the same time (`srt/arg_groups`) and llama.cpp b10195 to b11160 (`llama-server --help`);
`tests/test_serving.py` lists them.
"""

from __future__ import annotations

import json
import shlex

DEFAULT_LENGTHS = {
    "vLLM": (5, "the number in vLLM's own example"),
    "SGLang": (3, "SGLang's default"),
    "llama.cpp": (3, "llama.cpp's default"),
}
"""Engine -> the draft length in its lines, and whose it is: a length that is best in one engine's
loop says nothing about another, and what pays in one is measured there (`draftsmith engine`)."""


def served_lengths(depths: int = 1) -> dict[str, tuple[int, str]]:
    """The draft length in each engine's lines, and whose it is."""
    if depths == 1:
        return DEFAULT_LENGTHS
    return DEFAULT_LENGTHS | {"vLLM": (depths, "what the draft proposes after one forward")}


def serving_lines(draft: str, target: str, depths: int = 1) -> dict[str, str]:
    """The command lines with which engines serve a draft and its target (Hub ids or folders).

    A draft that proposes `depths` tokens after one forward is served so by vLLM alone of these,
    and with as many; the others take it for an ordinary draft.

    Without the sampling of the target's generation_config.json, which nobody has measured here.
    Of vLLM with greedy drafts, its default, and of "vLLM, sampled" with sampled drafts and block
    verification; of llama.cpp from files that were converted to GGUF.
    """
    greedy = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": served_lengths(depths)["vLLM"][0],
    }
    if depths > 1:
        greedy["parallel_drafting"] = True
    sampled = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    vllm = [
        f"vllm serve {shlex.quote(target)} --generation-config vllm --speculative-config "
        f"{shlex.quote(json.dumps(settings, ensure_ascii=False))}"
        for settings in (greedy, greedy | sampled)
    ]
    k = DEFAULT_LENGTHS["SGLang"][0]
    sglang = [
        f"sglang serve --model-path {shlex.quote(target)} --sampling-defaults openai",
        f"  --speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(draft)}",
        f"  --speculative-num-steps {k} --speculative-eagle-topk 1",
        f"  --speculative-num-draft-tokens {k + 1}",
    ]
    llama = [
        "llama-server --model target.gguf --spec-draft-model draft.gguf",
        f"  --spec-type draft-simple --spec-draft-n-max {DEFAULT_LENGTHS['llama.cpp'][0]}",
    ]
    return {
        "vLLM": vllm[0],
        "vLLM, sampled": vllm[1],
        "SGLang": " \\\n".join(sglang),
        "llama.cpp": " \\\n".join(llama),
    }
