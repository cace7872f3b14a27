"""Command lines and files for engines, against the options that the engines had when checked."""

from __future__ import annotations

import json
import shlex

from eval.publishing.release import DEFAULT_LENGTHS, served_lengths, serving_lines

# Fields of SpeculativeConfig in vllm/config/speculative.py, main of September 2026 (002e77c).
VLLM_KEYS = {
    "method": {"draft_model"},
    "model": None,
    "num_speculative_tokens": None,
    "draft_sample_method": {"greedy", "probabilistic"},
    "rejection_sample_method": {"standard", "block"},
}
VLLM_OPTIONS = {"--speculative-config"}
# python/sglang/srt/arg_groups/fields/spec.py (7e997c6) and fields/model.py.
# speculative_hook.py (004c82e) refuses --speculative-use-rejection-sampling with STANDALONE.
SGLANG_OPTIONS = {
    "--model-path",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
}
# llama-server --help of b10195, where --draft-max no longer exists; the types are of --spec-type.
LLAMA_OPTIONS = {"--model", "--spec-draft-model", "--spec-type", "--spec-draft-n-max"}


def words_of(line: str) -> list[str]:
    """The words of a command line as a shell has them, to which a continued line is one line."""
    return shlex.split(line.replace("\\\n", ""))


def options(words: list[str]) -> dict[str, str]:
    """--name value ... as a mapping; every option here has one value."""
    names, values = words[::2], words[1::2]
    assert len(names) == len(values)
    assert all(name.startswith("--") for name in names)
    return dict(zip(names, values, strict=True))


def test_vllm_reads_its_lines() -> None:
    lines = serving_lines("acme/draft", "acme/big model")
    for line in (lines["vLLM"], lines["vLLM, sampled"]):
        program, serve, target, *rest = words_of(line)
        assert (program, serve, target) == ("vllm", "serve", "acme/big model")
        given = options(rest)
        assert set(given) <= VLLM_OPTIONS
        settings = json.loads(given["--speculative-config"])
        for key, value in settings.items():
            known = VLLM_KEYS[key]
            assert known is None or value in known
        assert settings["model"] == "acme/draft"
        assert settings["num_speculative_tokens"] == DEFAULT_LENGTHS["vLLM"][0]
    assert settings["rejection_sample_method"] == "block"
    masked = words_of(serving_lines("acme/draft", "acme/target", depths=3)["vLLM"])[-1]
    assert served_lengths(depths=3)["vLLM"][0] == 3  # as the card says
    assert json.loads(masked) == {
        "method": "draft_model",
        "model": "acme/draft",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }


def test_sglang_reads_its_line() -> None:
    line = serving_lines("acme/draft", "acme/target")["SGLang"]
    program, serve, *rest = words_of(line)
    assert (program, serve) == ("sglang", "serve")
    given = options(rest)
    assert set(given) == SGLANG_OPTIONS
    assert given["--speculative-algorithm"] == "STANDALONE"
    # With one candidate a step, SGLang wants one more token: that of the target.
    assert int(given["--speculative-num-draft-tokens"]) == 1 + int(given["--speculative-num-steps"])


def test_llama_cpp_reads_its_line() -> None:
    line = serving_lines("acme/draft", "acme/target")["llama.cpp"]
    program, *rest = words_of(line)
    assert program == "llama-server"
    given = options(rest)
    assert set(given) == LLAMA_OPTIONS
    assert given["--spec-type"] == "draft-simple"
