"""Command lines of engines for a draft.

Options are those of vLLM 0.28 to main of September 2026 (`vllm/config/speculative.py`), SGLang main
of the same time (`srt/arg_groups`) and llama.cpp b11434 (`common/arg.cpp`);
`tests/eval/test_serving.py` lists them.
"""

from __future__ import annotations

import json
import shlex

from eval.reporting.rendering import source_and_revision
from specdata.drafts.kind import DraftKind
from specdata.drafts.mtp import FAMILIES
from specdata.drafts.plain import PLAIN_DRAFT

DEFAULT_LENGTHS = {
    "vLLM": (5, "the number in vLLM's own example"),
    "SGLang": (3, "SGLang's default"),
    "llama.cpp": (3, "llama.cpp's default"),
}
"""Engine -> the draft length in its lines, and whose it is: a length that is best in one engine's
loop says nothing about another, and what pays in one is measured there (`draftsmith engine`)."""
SERVED_FOLDER = "served"
"""The folder, in the lines, of a target that its head was written into."""


def served_lengths(kind: DraftKind = PLAIN_DRAFT, depths: int = 1) -> dict[str, tuple[int, str]]:
    """The draft length in each engine's lines, and whose it is."""
    lengths = dict(DEFAULT_LENGTHS)
    if kind.served.fastest:
        why = "what was fastest there with this project's own draft"
        lengths["vLLM"] = (kind.served.fastest, why)
    if kind.served.in_target:
        lengths["vLLM"] = (1, DEFAULT_LENGTHS["vLLM"][1])
    whole = (depths, "what the draft proposes after one forward")
    return lengths | dict.fromkeys(kind.served.one_forward_engines, whole)


def serving_lines(
    draft: str,
    target: str,
    kind: DraftKind = PLAIN_DRAFT,
    depths: int = 1,
    *,
    is_asked: bool = False,
    model_type: str = "",
) -> dict[str, str]:
    """The command lines with which engines serve a draft and its target (Hub ids or folders).

    Of a draft that proposes `depths` tokens after one forward; engines that do not draft so
    (`Served.one_forward_engines`) take it for an ordinary one. If it has a slot for an acceptance
    head, that `is_asked` or not there.

    Without the sampling of the target's generation_config.json, which nobody has measured here.
    Of vLLM with greedy drafts, its default, and of "vLLM, sampled", of a plain draft alone, with
    sampled drafts and block verification; of llama.cpp from files that were converted to GGUF.
    Of a target's own head the first line writes the target that they serve (the draft's own
    folder, if it is that already), and engines that draft with no head of its `model_type` have no
    line.
    """
    source, revision = source_and_revision(target)
    pinned = f" --revision {revision}" if revision else ""
    lengths, served = served_lengths(kind, depths), kind.served
    algorithm, form = served.method.upper(), served.method
    written: dict[str, str] = {}
    if not kind.layouts:
        algorithm, form = "STANDALONE", "simple"
    elif served.in_target:
        algorithm = "NEXTN"
        if draft != target:
            into = ["draftsmith", "export", draft, "--into", target, "--out", SERVED_FOLDER]
            written, source, pinned = {"draftsmith": shlex.join(into)}, SERVED_FOLDER, ""
    greedy = {
        "method": served.method,
        **({} if served.in_target else {"model": draft}),
        "num_speculative_tokens": lengths["vLLM"][0],
        **served.options,
    }
    sampled = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    vllm = [
        f"vllm serve {shlex.quote(source)}{pinned} --generation-config vllm --speculative-config "
        f"{shlex.quote(json.dumps(settings, ensure_ascii=False))}"
        for settings in (greedy, greedy | sampled)
    ]
    k, quoted = lengths["SGLang"][0], shlex.quote(draft)
    sglang = [
        f"sglang serve --model-path {shlex.quote(source)}{pinned} --sampling-defaults openai",
        f"  --speculative-algorithm {algorithm}",
    ]
    if not served.in_target:
        sglang[1] += f" --speculative-draft-model-path {quoted}"
    if "SGLang" not in served.one_forward_engines:  # else config.json says it
        sglang.append(f"  --speculative-num-steps {k} --speculative-eagle-topk 1")
        sglang.append(f"  --speculative-num-draft-tokens {k + 1}")
    drafts = "" if served.in_target else " --spec-draft-model draft.gguf"
    llama = [
        f"llama-server --model target.gguf{drafts}",
        f"  --spec-type draft-{form} --spec-draft-n-max {lengths['llama.cpp'][0]}",
    ]
    if kind.engine_head:
        llama[1] += f" --spec-draft-p-min {0.5 if is_asked else 0}"
    lines = {
        **written,
        "vLLM": vllm[0],
        **({} if kind.layouts else {"vLLM, sampled": vllm[1]}),
        "SGLang": " \\\n".join(sglang),
    }
    if not (served.in_target and model_type) or "llama.cpp" in FAMILIES[model_type].engines:
        lines["llama.cpp"] = " \\\n".join(llama)
    return lines
