"""Settings for every test: offline, quiet, one thread a process unless a test says otherwise."""

import multiprocessing
import os
import re
from collections import Counter
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests run side by side; bit-for-bit comparisons need the same number everywhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

RECURRENT = {"falcon_h1", "granitemoehybrid", "lfm2", "mamba", "mamba2", "qwen3_next"}
"""Families with recurrent layers, as tests are parametrised with them."""
RECURRENT_TESTS = {
    "test_a_round_reads_accepted_tokens_of_a_recurrent_target_once_more_at_most",
    "test_depths_that_a_draft_cannot_have_are_refused",
    "test_the_command_compares_each_method_and_names_what_it_cannot_use",
    "test_what_the_models_config_json_rules_out_is_refused_before_anything_is_made",
}
"""Tests that have such a model among others."""
TRAINED_PAIR = {
    "vocab_size": 400,
    "examples_per_family": 60,
    "library_characters": 8_000,
    "block_size": 64,
    "target_layers": 2,
    "target_width": 32,
    "target_steps": 40,
    "draft_width": 16,
    "draft_steps": 15,
    "save_steps": 10,
}
"""Of the fixture `trained_pair`, whose seed is 0."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with many slow tests first, so that no process waits for another's last file."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    if "get_conv_state" not in vars(import_module("transformers").Cache):
        refused = pytest.mark.skip(reason="recurrent layers are refused before transformers 5.21")
        for item in items:
            if (RECURRENT | RECURRENT_TESTS) & {
                *re.split(r"[\[\]-]", item.name)
            } and item.path.name != "test_families.py":
                item.add_marker(refused)


@pytest.fixture(scope="session")
def trained_pair() -> Path:
    """A toy pair trained in seconds, `target` and `draft`; kept between sessions, only to be read.

    What else several files want (rollouts, labels, a head of it) can be kept in the same way: a
    fixture here, by `tests.support.made_once.made_once`.
    """

    from distill.config import ToyPairConfig
    from distill.toy import train_toy_pair
    from tests.support.made_once import made_once

    config = ToyPairConfig(**TRAINED_PAIR)
    sources = "tests/conftest.py distill/toy.py distill/training.py specdata/toy/*.py"
    return made_once("pair", sources, lambda folder: train_toy_pair(folder, config, seed=0))


@pytest.fixture(scope="session")
def tiny_pair() -> Path:
    """Tiny random models with one tokenizer (`tests.support.random_pair`), kept likewise."""
    from tests.support.made_once import made_once
    from tests.support.random_pair import random_pair

    sources = "tests/support/random_pair.py distill/toy.py distill/training.py specdata/toy/*.py"
    return made_once("random", sources, random_pair)


@pytest.fixture(scope="session")
def word_pair() -> Path:
    """Tiny random models whose tokens are words (`tests.support.word_pair`), kept likewise."""
    from tests.support.made_once import made_once
    from tests.support.word_pair import word_pair

    return made_once("words", "tests/support/word_pair.py tests/support/tiny.py", word_pair)


@pytest.fixture(scope="session")
def results() -> Any:
    """Every family of methods on two prompt sets (`tests.support.synthetic_results`), only read."""
    from tests.support.synthetic_results import synthetic_results

    return synthetic_results("alpaca", "gsm8k")


@pytest.fixture(scope="session")
def pair(tiny_pair: Path) -> Path:
    """What a test takes to which it is all the same; several files have one of their own."""
    return tiny_pair


@pytest.fixture(scope="session")
def server() -> ForkServerContext:
    """Starts processes (`server.Process(target=, args=)`) with what they import already there.

    Each is a process of its own, which can be killed; `tests.support.two_processes` starts a group
    of two. What they run must be a function at the top of a module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distill.distillation", "distill.finetune", "heads.train"])
    return context
