"""Streams of keyed generators: fixed for ever, because stored artefacts depend on them."""

from __future__ import annotations

import torch

from specdata.sampling import generator_for, numpy_generator_for, seed_for


def test_the_streams_of_a_key_never_change() -> None:
    assert seed_for(3, "eval", "x") == 3499306883368770211
    drawn = torch.rand(2, generator=generator_for(3, "eval", "x"))
    assert drawn.tolist() == [0.4623185396194458, 0.79582679271698]
    mixing = numpy_generator_for("train", 0, 1, "a", 2).random(3)
    assert mixing.tolist() == [0.6329750427028136, 0.15412029921126247, 0.5664571168477873]


def test_keys_do_not_run_into_each_other() -> None:
    assert seed_for(0, "a", "b") != seed_for(0, "ab")
    assert seed_for(0, 1, 2) != seed_for(0, 12)
    assert seed_for(1, "a") != seed_for(0, "a")
