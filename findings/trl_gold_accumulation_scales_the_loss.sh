#!/bin/bash
# Guess: eight rows are one step of training, whether in one batch of 8 or in four of 2 by gradient_accumulation_steps=4: the loss is that of the
#   same tokens, and so is the gradient, as in trl's GKD trainer.
# What happens: in GOLDTrainer the loss depends on the number of accumulated batches, in opposite ways for its two losses. Its default, the
#   generalized Jensen-Shannon divergence, and its gradient are divided by it once too often (its loader yields all rows of a step once for each
#   batch, and each time all their tokens are counted); its ULD loss, for two tokenizers, is never divided, so it is multiplied by it. A run with
#   less memory and the same rows per step trains with another gradient and reports another loss: four batches report a quarter of the divergence, or
#   four times the ULD loss. Nothing is said.
# Packages: trl 1.16.0, transformers 5.24.0, torch 2.13.0, datasets 5.2.0, accelerate 1.15.0.
# Why met: trainers that distil were read for what their losses are means of; a small machine accumulates batches.
# Found: by reading what GOLD's loader repeats, after `num_items_in_batch` had been found wrong in GKD; then one step over the same eight rows in each way.
# Seen, loss of one step over the same rows as 1, 2 and 4 batches: GKD .249 .249 .249; GOLD .249 .125 .062; GOLD's ULD .142 .285 .569.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
torch.set_num_threads(1)
folder = sys.argv[1]
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
letters = Tokenizer(models.BPE({"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
tokenizer.save_pretrained(f"{folder}/teacher")
def model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0))
def text(first, n): return "".join(chr(48 + (first + 3 * j) % 64) for j in range(n))
rows = [{"messages": [{"role": "user", "content": text(i, 6)}, {"role": "assistant", "content": text(i + 18, 12)}]} for i in range(8)]
def step(trainer_class, config, batches, **how):                  # one step over the eight rows; all of one length, the dataset's own texts
    trainer = trainer_class(model=model(0), teacher_model=model(1), processing_class=tokenizer, train_dataset=Dataset.from_list(rows), args=config(
        output_dir=f"{folder}/o", lmbda=0.0, temperature=1.0, per_device_train_batch_size=8 // batches, gradient_accumulation_steps=batches, max_steps=1,
        learning_rate=0.0, logging_steps=1, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0, save_strategy="no", **how))
    trainer.train()
    log = next(x for x in trainer.state.log_history if "loss" in x)
    return log["loss"], log["grad_norm"]
print("trl", md.version("trl"))
uld = {"use_uld_loss": True, "use_extended_uld": False, "teacher_tokenizer_name_or_path": f"{folder}/teacher"}
for name, trainer_class, config, how, factor in (("GKD", GKDTrainer, GKDConfig, {}, lambda n: 1), ("GOLD", GOLDTrainer, GOLDConfig, {}, lambda n: 1 / n),
                                                 ("GOLD, ULD", GOLDTrainer, GOLDConfig, uld, lambda n: n)):
    seen = {n: step(trainer_class, config, n, **how) for n in (1, 2, 4)}
    print(f"{name}: " + "; ".join(f"{n} batches of {8 // n}: loss {loss:.3f}, gradient {norm:.3f}" for n, (loss, norm) in seen.items()))
    for n, of_n in seen.items():
        assert all(abs(a - factor(n) * b) < 1e-3 * abs(b) for a, b in zip(of_n, seen[1])), (name, n)
print("holds: GOLD's loss and gradient are those of the rows divided by the accumulated batches, with ULD multiplied by them; GKD's are right")
PY
"$tmp/v/bin/python" "$tmp/t.py" "$tmp" 2>"$tmp/err" || { tail -20 "$tmp/err" >&2; exit 1; }
