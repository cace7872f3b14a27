"""What several files of tests use of `test_families`."""

from functools import cache
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

# Encoders, or decoders of one, with a causal head; readers of images, sounds or states.
ENCODERS = """
bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet rembert
roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xmod
"""
OTHERS = """
blt fuyu git got_ocr2 moss_transcribe_diarize musicgen_decoder musicgen_melody_decoder moshi
gemma3 gemma3n gemma4 gemma4_unified gemma4_assistant gemma4_unified_assistant phi4_multimodal
"""
NOT_DECODERS = {*ENCODERS.split(), *OTHERS.split()}
"""Registered by transformers as causal language models, and none that decodes text by itself."""


@cache
def classes() -> dict[str, Any]:
    """The classes of causal language models by their configuration's model_type, each once."""
    found: dict[str, Any] = {}
    for models in MODEL_FOR_CAUSAL_LM_MAPPING.values():
        for model in models if isinstance(models, tuple) else (models,):
            found.setdefault(model.config_class.model_type, model)
    return {name: model for name, model in found.items() if name not in NOT_DECODERS}


NO_CACHE = "refused: no cache of transformers"
OWN_STATE = "refused: a state of their own kind"
NO_POSITIONS = "refused: positions of their own kind"
OWN_STATES = "deepseek_v4 dory minimax mllama_text_model qwen4_exp_text recurrent_gemma xlstm"
# Every other family decodes chains and batches, and trees unless its kind of cache forbids them.
REFUSED = {
    "cpmant": NO_POSITIONS,
    **dict.fromkeys(("openai-gpt", "reformer", "rwkv", "xlnet"), NO_CACHE),
    **dict.fromkeys(OWN_STATES.split(), OWN_STATE),
}
