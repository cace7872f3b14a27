#!/bin/bash
# Guess: a DeepSeek V3 folder whose config says `num_nextn_predict_layers: 1` and which holds that layer of multi-token prediction, behind its last
#   layer as published ones have it, is converted by llama.cpp's convert_hf_to_gguf.py with the layer, as a GLM-4.5 folder is; or the converter
#   says that it leaves the layer out. So `--spec-type draft-mtp` ("Use Multi Token Prediction (MTP) heads from the main model") can draft with it.
# What happens: the layer is dropped: no tensor of it is in the GGUF file, nor `nextn_predict_layers`. The converter ends with success and no
#   line of its output speaks of it; three warnings do not either, they are about keys written twice. (Its source does: `skip_mtp = True` under a
#   TODO. Asked for the head alone, by --mtp, it ends with "not supported".) The file's architecture, deepseek2, is not what forbids it: the same
#   folder under the name of GLM-4.7-Flash's class, whose tensors have the same names, becomes a deepseek2 file with the layer. Who converts the
#   folder and asks for draft-mtp learns of it there: no context for the head is made, "model doesn't contain MTP layers" (read in the source, not run).
# Packages: llama-cpp-python 0.3.36 (its source holds llama.cpp with the converter and gguf-py), transformers 4.57.6, numpy 2.2.6, torch 2.13.0.
# Why met: heads trained for several families were to be served by llama.cpp.
# Found: by listing the tensors of each family's converted file.
# Seen: tensors of the head in the file: GLM-4.5 20 (nextn_predict_layers 1), DeepSeek V3 0 (no such key), the same folder by the other name 24 (1).
set -euo pipefail
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HF_HOME="$tmp/hf"
python3 -m venv "$tmp/v"; "$tmp/v/bin/pip" install -q torch==2.13.0
"$tmp/v/bin/pip" install -q transformers==4.57.6 numpy==2.2.6 sentencepiece==0.2.1 requests==2.32.5
"$tmp/v/bin/pip" download -q --no-deps --no-binary :all: -d "$tmp" llama-cpp-python==0.3.36
mkdir "$tmp/src"; tar xzf "$tmp"/llama_cpp_python-0.3.36.tar.gz -C "$tmp/src" --strip-components=3 llama_cpp_python-0.3.36/vendor/llama.cpp
cat > "$tmp/convert.py" <<'PY'
# The converter as it is, but for the name of the pre-tokenizer: it is known by a hash of a published tokenizer's ids, which a tiny one cannot have.
import runpy, sys
sys.path[:0] = ["src", "src/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
runpy.run_path("src/convert_hf_to_gguf.py", run_name="__main__")
PY
cat > "$tmp/t.py" <<'PY'
import json, re, shutil, subprocess, sys, torch, transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
sys.path.insert(0, "src/gguf-py")
import gguf
LAYERS, H, V, HEAD = 2, 32, 320, "model.layers.2."
sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=48, moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=1,
    n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE({each: i for i, each in enumerate([*letters, "ab"])}, [("a", "b")])); words.pre_tokenizer = pre_tokenizers.ByteLevel()
words = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>",
    additional_special_tokens=["[gMASK]", "<|user|>", "<|observation|>"])      # GLM's converter looks for these
def make(folder, kind, **more):      # a model of three layers, the last of which is made the head
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(num_hidden_layers=LAYERS + 1, **sizes, **more)
    getattr(transformers, kind + "ForCausalLM")(config).save_pretrained(folder); words.save_pretrained(folder)
    tensors = load_file(f"{folder}/model.safetensors")
    tensors |= {f"{HEAD}{name}.weight": torch.ones(H) for name in ("enorm", "hnorm", "shared_head.norm")} | {f"{HEAD}eh_proj.weight": torch.randn(H, 2 * H) / 5}
    tensors |= {HEAD + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(), HEAD + "shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"}); rewrite(folder, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return sum(name.startswith(HEAD) for name in tensors)
def rewrite(folder, **new): config = json.load(open(f"{folder}/config.json")) | new; json.dump(config, open(f"{folder}/config.json", "w"))
def convert(folder, *more):
    done = subprocess.run([sys.executable, "convert.py", folder, "--outtype", "f32", "--outfile", folder + ".gguf", *more], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr
def converted(folder):
    code, said = convert(folder); assert code == 0 and "successfully exported" in said, said
    file = gguf.GGUFReader(folder + ".gguf"); name = file.fields["general.architecture"].contents()
    layers = file.fields.get(name + ".nextn_predict_layers")
    return name, sum(each.name.startswith("blk.2.") for each in file.tensors), layers and layers.contents(), said
held = {"glm": make("glm", "Glm4Moe", head_dim=16),
    "deepseek": make("deepseek", "DeepseekV3", q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)}
shutil.copytree("deepseek", "renamed"); rewrite("renamed", architectures=["Glm4MoeLiteForCausalLM"]); held["renamed"] = held["deepseek"]
found = {folder: converted(folder) for folder in held}
print("llama.cpp of llama-cpp-python 0.3.36")
for folder, (name, count, layers, _) in found.items():
    print(f"{folder}: {held[folder]} tensors of the head in the folder; converted to {name}: {count}, nextn_predict_layers {layers}")
told = re.findall(r"(?i).*(?:mtp|nextn|multi-token|skip|drop|ignor|layers\.2|blk\.2).*", found["deepseek"][3])
code, said = convert("deepseek", "--mtp"); print(f"deepseek: lines that tell of it: {len(told)}; --mtp: exit {code}, {said.strip().splitlines()[-1]}")
assert found["glm"][1] > 15 and found["glm"][2] == 1, "GLM-4.5's head is written"
assert found["renamed"][0] == found["deepseek"][0] == "deepseek2" and found["renamed"][1] > 15 and found["renamed"][2] == 1, "this architecture can hold a head"
assert found["deepseek"][1] == 0 and found["deepseek"][2] is None, "changed: DeepSeek V3's head is written"
assert code == 1 and "not supported" in said, "changed: the head alone can be exported"
assert not told, "changed: the converter says that the head is left out"
print("as found")
PY
cd "$tmp"; "$tmp/v/bin/python" t.py 2> "$tmp/err" || { cat "$tmp/err" >&2; exit 1; }
