#!/bin/bash
# Guess: the loss and token accuracy that SFTTrainer reports are those of the model that it trains; 100 % accuracy means that the model learned.
# What happens: the trainer no longer calls the model's forward. It runs the body and multiplies its states by the weight of
#   `get_output_embeddings()` itself. Where a model has layers between the two (ModernBERT's decoders: lm_head.dense and .norm; BERT as a
#   decoder: cls.predictions.transform) they are left out, in training and in evaluation alike: the reported loss falls to 0 with an
#   accuracy of 1, the head's layers get no gradient and are bit for bit as they were, and the model's own forward, which
#   generation calls, is worse than before training. Nothing warns. A Llama (no such layers) reports its own loss.
# Packages: trl 1.16.0, transformers 5.24.0, torch 2.13.0.
# Why met: decoders of an encoder's family are small, so natural drafts; one that was fine-tuned here reported a loss of 7.30 -> 1.24 while its own stayed at 7.00.
# Found: the loss of `model(...)` computed by hand after training, against the trainer's; then which tensors had changed.
# Seen: Llama reported 0.009, own 0.009; ModernBertDecoder reported 0.010 (accuracy 1.00), own 5.467 after 4.149 at the start; BertLMHeadModel
#   reported 0.012 (accuracy 1.00), own 5.073 after 4.165 (a uniform guess has 4.159).
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, math, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM, ModernBertDecoderConfig, ModernBertDecoderForCausalLM,
    PreTrainedTokenizerFast)
from trl import SFTConfig, SFTTrainer
torch.set_num_threads(1)
V = 64
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, "w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w0")
rows = [[(s + 3 * j) % (V - 2) + 2 for j in range(24)] for s in range(62)]        # the next token is always the last one plus 3
data, probe = Dataset.from_dict({"input_ids": rows}), torch.tensor(rows[:16])
size = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1)
make = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **size)),
    "ModernBertDecoder": lambda: ModernBertDecoderForCausalLM(ModernBertDecoderConfig(cls_token_id=1, sep_token_id=1, **size)),
    "BertLMHeadModel": lambda: BertLMHeadModel(BertConfig(is_decoder=True, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **size)),
}
@torch.no_grad()
def own_loss(model):
    logits = model.eval()(input_ids=probe).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, V), probe[:, 1:].reshape(-1)).item()
def run(kind):
    torch.manual_seed(0); model = make[kind]()
    start, before = own_loss(model), {k: v.clone() for k, v in model.state_dict().items()}
    args = SFTConfig(sys.argv[1], max_steps=150, per_device_train_batch_size=16, learning_rate=5e-3, lr_scheduler_type="constant", logging_strategy="no",
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True)
    trainer = SFTTrainer(model, args=args, train_dataset=data, eval_dataset=data.select(range(16)), processing_class=tokenizer)
    trainer.train(); end = trainer.evaluate()
    same = [k for k, v in model.state_dict().items() if v.is_floating_point() and torch.equal(v, before[k])]
    return start, end["eval_loss"], end["eval_mean_token_accuracy"], own_loss(model), same
print("trl", md.version("trl"), "transformers", md.version("transformers"))
for kind in make:
    start, reported, accuracy, own, same = run(kind)
    print(f"{kind}: own loss at the start {start:.3f}; after training: reported {reported:.3f} (accuracy {accuracy:.2f}), own {own:.3f}; tensors as they were: {same}")
    assert reported < 0.1 and accuracy == 1
    if kind == "Llama": assert abs(own - reported) < 1e-3 and not same
    else: assert own > math.log(V) - 0.5 and any("dense.weight" in k for k in same)
print("holds: layers between body and output matrix take no part in SFTTrainer's loss, and the model does not learn")
PY
"$tmp/v/bin/python" "$tmp/t.py" "$tmp/out" 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
