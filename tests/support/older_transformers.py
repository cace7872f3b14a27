"""Run with transformers 4: what it makes of a model's folder, as JSON.

python tests/support/older_transformers.py FOLDER TEXT
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, text: str) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(prompt).logits[0]
    return {
        "version": transformers.__version__,
        "dtype": str(model.dtype),
        "prompt": prompt[0].tolist(),
        "logits": logits.tolist(),
        "text": tokenizer.decode(prompt[0]),
        "pad": tokenizer.pad_token_id,
        "end": tokenizer.eos_token_id,
        "draft_length": model.generation_config.num_assistant_tokens,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
