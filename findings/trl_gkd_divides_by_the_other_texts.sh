#!/bin/bash
# Guess: GKDTrainer's loss on texts that the student writes is their divergence per token, as it is on the dataset's texts; the dataset's answers, which
#   these texts replace, have no say in it. So a reported loss tells how near the student is, and `lmbda` alone says how much on-policy texts count.
# What happens: the divergence is summed over the student's tokens and divided by the number of the dataset's tokens, which was counted before the student
#   wrote. Loss and gradient are too large by (tokens written) / (tokens of the replaced answers): 8 times for answers of 4 tokens and texts of 32, with
#   the very same prompts and texts, and right by accident where both are as long. A placeholder as answer makes that max_new_tokens times. At the default
#   `lmbda` 0.5 batches of the one kind outweigh the other by the same factor. Nothing is said. (trl's DistillationTrainer counts anew and says why in a comment.)
# Packages: trl 1.16.0, transformers 5.24.0, torch 2.13.0, datasets 5.2.0, accelerate 1.15.0.
# Why met: trainers that distil were read for what their losses are means of, since such figures are compared with those of drafts trained here.
# Found: by reading where `num_items_in_batch` is counted; then the same texts written with two sets of answers, and the loss of every trained token summed up.
# Seen, loss and norm of the gradient, student's texts of 32 tokens: answers of 4 tokens 1.853 and 1.193, of 32 tokens 0.232 and 0.149, true in both
#   0.232; the dataset's texts alone (lmbda 0): 0.242 of 0.242 and 0.232 of 0.232.
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0; "$tmp/v/bin/pip" install -q trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, sys, torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer
torch.set_num_threads(1)
V, WRITTEN = 64, 32
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, "w0")); words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
def model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0))
def text(first, n): return " ".join(f"w{(first + 3 * j) % (V - 2) + 2}" for j in range(n))
def train(lmbda, answer):
    rows = [{"messages": [{"role": "user", "content": text(i, 6)}, {"role": "assistant", "content": text(i + 18, answer)}]} for i in range(8)]
    trainer = GKDTrainer(model=model(0), teacher_model=model(1), processing_class=tokenizer, train_dataset=Dataset.from_list(rows), args=GKDConfig(
        output_dir=f"{sys.argv[1]}/o", lmbda=lmbda, max_new_tokens=WRITTEN, temperature=1.0, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=2, learning_rate=0.0, logging_steps=1, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0, save_strategy="no"))
    trained, of_trl = [], trainer.generalized_jsd_loss
    def loss(student_logits, teacher_logits, labels, **rest):     # trl's own, and its sum over the trained tokens beside it
        total = of_trl(student_logits, teacher_logits, labels, beta=rest["beta"], reduction="sum").item()
        trained.append((total, (labels != -100).sum().item()))
        return of_trl(student_logits, teacher_logits, labels, **rest)
    trainer.generalized_jsd_loss = loss
    trainer.train()
    logs = [x for x in trainer.state.log_history if "loss" in x]
    total, tokens = (sum(x) for x in zip(*trained))
    reported, norm = (sum(x[k] for x in logs) / len(logs) for k in ("loss", "grad_norm"))
    print(f"lmbda {lmbda}, answers of {answer} tokens, {tokens} tokens trained: reported {reported:.3f} (gradient {norm:.3f}), mean over the trained tokens {total / tokens:.3f}")
    return reported, norm, total / tokens
print("trl", md.version("trl"))
alike = lambda a, b: abs(a - b) < 1e-3 * abs(b)
for answer in (4, 32):
    reported, _, true = train(0.0, answer); assert alike(reported, true)
short, norm_of_short, true_of_short = train(1.0, 4)
long, norm_of_long, true_of_long = train(1.0, 32)
assert alike(true_of_short, true_of_long) and alike(long, true_of_long)          # the same texts, whatever the dataset answers
assert alike(short, 8 * true_of_short) and alike(norm_of_short, 8 * norm_of_long)
print("holds: on-policy loss and gradient are multiplied by (tokens written) / (tokens of the dataset's answers)")
PY
"$tmp/v/bin/python" "$tmp/t.py" "$tmp" 2>"$tmp/err" || { tail -20 "$tmp/err" >&2; exit 1; }
