"""Command lines and files for engines, against the options that the engines had when checked."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from eval.publishing import serving
from eval.publishing.serving import DEFAULT_LENGTHS, served_lengths, serving_lines
from eval.reporting.rendering import source_arguments
from specdata.drafts import DRAFT_KINDS
from specdata.drafts.dspark import DSPARK
from specdata.drafts.eagle3 import EAGLE3
from specdata.drafts.masks import MASKS
from specdata.drafts.mtp import MTP

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "docs" / "engines.md", ROOT / "distill" / "drafts" / "dspark.py"
# Fields of SpeculativeConfig in vllm/config/speculative.py, main of September 2026 (002e77c).
VLLM_KEYS = {
    "method": {"draft_model", "eagle3", "dspark", "mtp"},
    "model": None,
    "num_speculative_tokens": None,
    "draft_sample_method": {"greedy", "probabilistic"},
    "rejection_sample_method": {"standard", "block"},
}
VLLM_OPTIONS = {"--speculative-config", "--generation-config"}
# python/sglang/srt/arg_groups/fields/spec.py (7e997c6) and fields/model.py.
# speculative_hook.py (004c82e) refuses --speculative-use-rejection-sampling with STANDALONE.
SGLANG_OPTIONS = {
    "--model-path",
    "--sampling-defaults",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
}
STEPS = re.compile("num|topk")  # which DSpark's config.json says
# common/arg.cpp, and for the types common/speculative.cpp.
LLAMA_BUILD = "b11434"
LLAMA_OPTIONS = {"--model", "--spec-draft-model", "--spec-type", "--spec-draft-n-max"}
LLAMA_ASKS = "--spec-draft-p-min"  # an acceptance head
LLAMA_TYPES = {"draft-simple", "draft-eagle3", "draft-dspark", "draft-mtp"}


def options(engine: str, program: str, target: str = "acme/target", **asked: Any) -> dict[str, str]:
    """Of an engine's line as a shell reads it: --name value ..., after the program's words."""
    line = serving_lines("acme/draft", target, **asked)[engine]  # a continued line is one
    words, begin = shlex.split(line.replace("\\\n", "")), shlex.split(program)
    assert words[: len(begin)] == begin
    return dict(zip(words[len(begin) :: 2], words[len(begin) + 1 :: 2], strict=True))


def test_vllm_reads_its_lines() -> None:
    for engine in ("vLLM", "vLLM, sampled"):
        given = options(engine, "vllm serve 'acme/big model'", "acme/big model")
        assert set(given) <= VLLM_OPTIONS
        assert given["--generation-config"] == "vllm"  # else it applies the target's penalties
        settings = json.loads(given["--speculative-config"])
        for key, value in settings.items():
            known = VLLM_KEYS[key]
            assert known is None or value in known
        assert settings["model"] == "acme/draft"
        assert settings["num_speculative_tokens"] == DEFAULT_LENGTHS["vLLM"][0]
    assert settings["rejection_sample_method"] == "block"
    asked: dict[str, Any] = {"kind": MASKS, "depths": 3}
    masked = options("vLLM", "vllm serve acme/target", **asked)["--speculative-config"]
    assert served_lengths(**asked)["vLLM"][0] == 3  # as the card says
    assert json.loads(masked) == {
        "method": "draft_model",
        "model": "acme/draft",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    for kind, depths, length in (("eagle3", 1, 2), ("dspark", 7, 7)):
        given = options("vLLM", "vllm serve acme/target", kind=DRAFT_KINDS[kind], depths=depths)
        assert json.loads(given["--speculative-config"]) == {
            "method": kind,
            "model": "acme/draft",
            "num_speculative_tokens": length,
        }


def test_a_targets_head_is_served_from_the_folder_that_it_was_written_into() -> None:
    lines = serving_lines("acme/draft", "acme/target@v1", MTP)
    into = "--into acme/target@v1 --out served"
    assert lines["draftsmith"] == f"draftsmith export acme/draft {into}"
    given = options("vLLM", "vllm serve served", kind=MTP)
    assert json.loads(given["--speculative-config"]) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }
    given = options("SGLang", "sglang serve --model-path served", kind=MTP)
    assert given["--speculative-algorithm"] == "NEXTN"
    assert set(given) == SGLANG_OPTIONS - {"--model-path", "--speculative-draft-model-path"}
    given = options("llama.cpp", "llama-server", kind=MTP)
    assert set(given) == LLAMA_OPTIONS - {"--spec-draft-model"}
    assert given["--spec-type"] in LLAMA_TYPES
    alone = serving_lines("served", "served", MTP)
    assert lines == {"draftsmith": lines["draftsmith"], **alone}


def test_a_head_that_llama_cpp_does_not_draft_with_has_no_line_of_it() -> None:
    """deepseek_v3 is left out by its converter, and exaone_moe has no graph of it there."""
    for model_type, has in (("glm4_moe", True), ("deepseek_v3", False), ("exaone_moe", False)):
        lines = serving_lines("acme/draft", "acme/target", MTP, model_type=model_type)
        assert ("llama.cpp" in lines) == has, model_type


def test_a_targets_revision_is_an_option() -> None:
    for engine, program in (("vLLM", "vllm serve acme/target"), ("SGLang", "sglang serve")):
        assert options(engine, program, "acme/target@v1.0")["--revision"] == "v1.0"
    assert source_arguments("acme/target@v1.0") == '"acme/target", revision="v1.0"'


def test_sglang_reads_its_line() -> None:
    given = options("SGLang", "sglang serve")
    assert set(given) == SGLANG_OPTIONS
    assert given["--speculative-algorithm"] == "STANDALONE"
    # With one candidate a step, SGLang wants one more token: that of the target.
    assert int(given["--speculative-num-draft-tokens"]) == 1 + int(given["--speculative-num-steps"])
    for kind, more in (("eagle3", set()), ("dspark", {*filter(STEPS.search, SGLANG_OPTIONS)})):
        given = options("SGLang", "sglang serve", kind=DRAFT_KINDS[kind], depths=7)
        assert given["--speculative-algorithm"] == kind.upper()
        assert set(given) == SGLANG_OPTIONS - more


def test_llama_cpp_reads_its_line() -> None:
    given = options("llama.cpp", "llama-server")
    assert set(given) == LLAMA_OPTIONS
    assert given["--spec-type"] == "draft-simple"
    for is_asked in (False, True):
        blocks = options("llama.cpp", "llama-server", kind=DSPARK, depths=7, is_asked=is_asked)
        assert set(blocks) == {*LLAMA_OPTIONS, LLAMA_ASKS}
        assert (float(blocks[LLAMA_ASKS]) > 0) == is_asked
        types = {
            blocks["--spec-type"],
            options("llama.cpp", "llama-server", kind=EAGLE3)["--spec-type"],
        }
        assert types | {given["--spec-type"], "draft-mtp"} == LLAMA_TYPES
    assert set(re.findall(r"`(draft-\w+)`", ENGINES[0].read_text())) == LLAMA_TYPES


def test_the_options_of_llama_cpp_are_of_the_build_that_the_documents_name() -> None:
    for text in (serving.__doc__ or "", *(page.read_text() for page in ENGINES)):
        assert set(re.findall(r"\bb\d{5}\b", text)) == {LLAMA_BUILD}
