"""A batch decodes each sequence as if it were alone, and keeps its slots busy."""

from typing import Any

import pytest
import torch
from transformers import NemotronConfig, NemotronForCausalLM

from eval.decoder import DecodeConfig, Generation, SpeculativeDecoder
from eval.runtime import batches
from eval.runtime.engines import Engine
from eval.runtime.feeding import sequence_of
from eval.runtime.feeding.plain import Forward
from eval.runtime.model import CachedModel
from specdata.probability import SamplingConfig
from tests.support.batches import CASES
from tests.support.decoder import head
from tests.support.tiny import tiny_llama

PROMPTS = [torch.tensor(ids) for ids in ([2], [3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [5, 6], [1, 1])]


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]


def counts(out: Generation) -> list[tuple[int, ...]]:
    return [(r.drafted, r.depth, r.accepted, r.emitted, r.draft_forwards) for r in out.rounds]


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "eager") for name in CASES), ("chain", "captured")]
)
def test_each_sequence_of_a_batch_is_what_decoding_it_alone_gives(
    name: str, engine: Engine
) -> None:
    """In float64, so that rounding cannot decide a draw."""
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)
    models = target, None if name == "plain" else draft
    decoder = SpeculativeDecoder.from_config(*models, CASES[name], head().double())
    alone = [
        decoder.generate(prompt, max_new_tokens=20, generator=generator)
        for prompt, generator in zip(PROMPTS, generators(), strict=True)
    ]
    done: list[int] = []
    if engine != "eager":
        decoder = SpeculativeDecoder.from_config(
            *models, CASES[name], head().double(), engine=engine
        )
    batch = decoder.generate_batch(
        PROMPTS, max_new_tokens=20, generators=generators(), size=3, report=done.append
    )
    assert [out.tokens.tolist() for out in batch] == [out.tokens.tolist() for out in alone]
    assert [out.finish for out in batch] == [out.finish for out in alone]
    assert [counts(out) for out in batch] == [counts(out) for out in alone]
    assert done == [1] * len(PROMPTS)


def test_sequences_that_need_the_same_model_share_its_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = tiny_llama(2, vocab=40), tiny_llama(2, vocab=40)
    target.config.eos_token_id = target.generation_config.eos_token_id = None
    served: set[tuple[bool, int]] = set()
    run_all = batches.run_all

    def counted(forwards: list[Forward]) -> list[torch.Tensor]:
        served.add((forwards[0].sequence.model.model is target, len(forwards)))
        return run_all(forwards)

    monkeypatch.setattr(batches, "run_all", counted)
    decoder = SpeculativeDecoder.from_config(target, draft, DecodeConfig(length=3))
    # The draft equals the target, so every round of every sequence has the same length.
    prompts = [torch.tensor([3, 4]), torch.tensor([5])]
    decoder.generate_batch(prompts, max_new_tokens=16, generators=generators()[:2], size=2)
    assert served == {(True, 2), (False, 2)}


def test_no_sequence_and_an_error_in_one_leave_the_decoder_usable() -> None:
    decoder = SpeculativeDecoder.from_config(
        tiny_llama(0, vocab=40), tiny_llama(1, vocab=40), DecodeConfig(length=3)
    )
    assert decoder.generate_batch([], max_new_tokens=4, generators=[]) == []
    good, bad = torch.tensor([2, 3]), torch.tensor([], dtype=torch.long)
    seeds = [torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)]
    with pytest.raises(ValueError, match="T >= 1"):
        decoder.generate_batch([good, bad], max_new_tokens=9, generators=seeds)
    first = decoder.generate(good, max_new_tokens=9, generator=torch.Generator().manual_seed(0))
    (again,) = decoder.generate_batch(
        [good], max_new_tokens=9, generators=[torch.Generator().manual_seed(0)]
    )
    assert first.tokens.tolist() == again.tokens.tolist()


def nemotron() -> NemotronForCausalLM:
    """Keeps arguments from its attention."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    return NemotronForCausalLM(NemotronConfig(**sizes, **heads)).eval()


@pytest.mark.parametrize("model", [tiny_llama(2, vocab=40, layers=2), nemotron()], ids=type)
def test_sequences_of_different_lengths_are_run_without_padding(model: Any) -> None:
    """Also beside a tree, in the slot between them."""
    cached, read = CachedModel(model, 40), list[tuple[int, ...]]()
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, args, __: read.append(tuple(args[0].shape))
    )
    attention, logits = model.config._attn_implementation, []
    for together in (False, True):
        cached.kv_cache.free()
        sequences = [sequence_of(cached, slot, SamplingConfig()) for slot in range(4)]
        for slot, sequence in enumerate(sequences):
            sequence.append([2 + slot] * (3 + 2 * slot), 1).run()
        forwards = [
            sequence.append(list(range(3, 3 + length)), length)
            for sequence, length in zip(sequences, (9, 2, 1), strict=False)
        ]
        forwards.append(sequences[3].append_tree([5, 6, 7, 8], [0, 0, 1, 2], [9]))
        read.clear()
        with torch.inference_mode():
            logits.append(batches.run_all(forwards) if together else [*map(Forward.run, forwards)])
    hook.remove()
    assert read == [(1, 9 + 2 + 1 + 5)]
    torch.testing.assert_close(logits[1], logits[0])
    assert model.config._attn_implementation == attention
