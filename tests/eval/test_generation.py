"""transformers' own decoding as a reference: of the model's generation configuration it takes none.

Every field of `GenerationConfig` has a value here that is not its default; a new field needs one.
"""

from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from eval.analysis.ties import greedy_reference
from eval.measuring.assisted import assisted_generate
from specdata.sampling import UNAPPLIED, SamplingConfig, unapplied
from tests.support.tiny import tiny_llama

PROMPT, NEW, SAMPLING = torch.tensor([2, 5, 3, 2, 5]), 10, SamplingConfig(1.3, 9, 0.98)
IDS = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
FIELDS = {
    # What changes a text.
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 3.0),
    **dict.fromkeys(("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), 0.3),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 1),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), IDS),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), 6),
    **dict.fromkeys(("min_length", "min_new_tokens"), 40),
    "bad_words_ids": [[each] for each in IDS],
    "force_words_ids": [[3]],
    "sequence_bias": [[[2], 20.0]],
    "exponential_decay_length_penalty": (1, 9.0),
    "watermarking_config": {"bias": 20.0},
    "constraints": [1],
    "penalty_alpha": 0.9,
    "dola_layers": "low",
    "num_beams": 3,
    "stop_strings": ["a"],
    "token_healing": True,
    "max_time": 1e-9,
    # What `sampling` and the number of tokens say.
    **{"do_sample": True, "temperature": 0.4, "top_k": 3, "top_p": 0.5, "min_p": 0.3},
    **{"max_length": 6, "max_new_tokens": 3},
    # How it is computed, and what is said of it.
    **{"use_mtp": True, "use_cache": False, "cache_implementation": "static", "cache_config": {}},
    **{"max_cache_len": 5, "prefill_chunk_size": 2, "disable_compile": True, "low_memory": True},
    **{"early_stopping": True, "length_penalty": 3.0, "diversity_penalty": 2.0},
    **{"num_beam_groups": 2, "num_return_sequences": 2, "decoder_start_token_id": 3},
    **{"renormalize_logits": True, "remove_invalid_values": True, "speculation_type": "other"},
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores"), True),
    **dict.fromkeys(("output_logits", "return_dict_in_generate", "is_assistant"), True),
    **dict.fromkeys(("num_assistant_tokens", "prompt_lookup_num_tokens"), 2),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"), 3),
    **{"num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9},
    **{"assistant_early_exit": 1, "assistant_ensemble_weight": 0.5},
}
NOT_SET = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_commit_hash"}
NOT_SET |= {"_from_model_config", "compile_config", "continuous_batching_config"}
# Of a text that greedy decoding changes or refuses, and no server is asked for.
OTHERS = {"use_mtp", "num_return_sequences", "is_assistant", "assistant_early_exit"}


def pair() -> list[LlamaForCausalLM]:
    return [tiny_llama(seed, vocab=12).float() for seed in (0, 1)]


def references(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> list[list[int]]:
    """The greedy text, a sampled one of the target alone, and one with its draft."""
    given = {"length": 3, "sampling": SAMPLING, "max_new_tokens": NEW, "seed": 0}
    drawn = [assisted_generate(target, each, PROMPT, **given) for each in (None, draft)]
    return [greedy_reference(target, PROMPT, NEW).tolist(), *(x.tokens.tolist() for x in drawn)]


@cache
def expected() -> list[list[int]]:
    """The same of models that ask for nothing, the greedy one by hand."""
    models, ids = pair(), PROMPT
    while len(ids) < len(PROMPT) + NEW:
        ids = torch.cat([ids, models[0](input_ids=ids[None]).logits[0, -1].argmax()[None]])
    return [ids[len(PROMPT) :].tolist(), *references(*models)[1:]]


def inherited(target: LlamaForCausalLM) -> list[int] | None:
    """A greedy text whose configuration leaves open what it does not say; None if refused."""
    ids, own = PROMPT[None], target.generation_config
    special = {name: getattr(own, name) for name in ("eos_token_id", "pad_token_id")}
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW, **special)
    try:
        made = target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    except (ValueError, TypeError):
        return None
    new: Tensor = getattr(made, "sequences", made)[0, len(PROMPT) :]
    return new.tolist()


def test_every_field_of_a_generation_configuration_is_known() -> None:
    assert set(vars(GenerationConfig())) - NOT_SET <= set(FIELDS)
    neutral = {"guidance_scale": 1.0, "min_new_tokens": 0, "stop_strings": [], "sequence_bias": {}}
    assert unapplied(UNAPPLIED | neutral) == {}


@pytest.mark.filterwarnings("ignore")  # of transformers, about values that contradict each other
@pytest.mark.parametrize("name", sorted(FIELDS))
def test_no_field_of_a_models_own_configuration_reaches_a_reference(name: str) -> None:
    models = pair()
    for each in models:
        setattr(each.generation_config, name, FIELDS[name])
    assert references(*models) == expected()
    asked = models[0].generation_config.to_dict()
    assert asked[name] == FIELDS[name], "it has its own again"
    assert (name in unapplied(asked)) == (name in UNAPPLIED)
    is_changed = inherited(models[0]) != expected()[0]
    assert not is_changed or name in UNAPPLIED or name in OTHERS
