# Two commands do everything on a fresh machine: `make compare` and `make test`. `make` alone lists the rest.

PYTHON ?= python3
VENV   ?= .venv
OUT    ?= runs/quick
JOBS   ?= 2

BIN     := $(VENV)/bin
BASE    := $(VENV)/.installed
DEV     := $(VENV)/.installed-dev
# pip compiles bytecode on one core; done afterwards on all of them, an install takes two thirds of the time.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help install compare test test-all lint format test-versions test-vllm bench bench-data bench-pairs bench-variants docs clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' Makefile

compare: $(BASE)  ## train a Transformer and value-residual models on real text, write runs/quick/report.html
	$(BIN)/resformer suite run quick --out $(OUT) --jobs $(JOBS)

test: $(DEV)  ## the unit tests (a few minutes; without those marked slow or gpu)
	$(PYTEST) -m "not slow and not gpu"

test-all: $(DEV)  ## all tests that need no accelerator
	$(PYTEST) -m "not gpu"

lint: $(DEV)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)  ## rewrite files as `make lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-versions:  ## model, contract and generation tests with the oldest and newest supported transformers, in throw-away environments
	PYTHON=$(PYTHON) bash .ci/test-versions

test-vllm:  ## the plug-in in vLLM's build for CPUs, in a throw-away environment (3.5 GB)
	PYTHON=$(PYTHON) bash .ci/test-vllm

bench: $(DEV)  ## speed and memory of a training step against other libraries, side by side (half an hour)
	$(BIN)/python benchmarks/train_step.py peers --json-file benchmarks/results/step-cpu.json
	$(BIN)/python benchmarks/train_step.py memory --json-file benchmarks/results/step-memory.json
	$(BIN)/python benchmarks/train_step.py grid --json-file benchmarks/results/step-grid.json
	$(BIN)/python benchmarks/train_step.py loop --json-file benchmarks/results/step-loop.json
	$(BIN)/python benchmarks/train_step.py peers --shape 82m --json-file benchmarks/results/step-82m.json

bench-data: $(DEV)  ## speed and memory of preparing a corpus against what is installed of other libraries (five minutes)
	$(BIN)/python benchmarks/prepare.py --megabytes 40 --json-file benchmarks/results/prepare.json

bench-pairs: $(DEV)  ## speed of one training step against LlamaForCausalLM of equal weights (20 minutes)
	$(BIN)/python benchmarks/train_step.py pairs

bench-variants: $(DEV)  ## step time of every variant relative to the Transformer (a quarter of an hour), for docs/variants.md
	$(BIN)/python benchmarks/variants.py --json-file benchmarks/results/variants.json

docs: $(BASE)  ## write docs/variants.md from the variants and the last `make bench-variants`
	$(BIN)/python docs/generate.py

install: $(BASE)  ## create the environment and install, nothing else

clean:  ## remove the environment and caches; runs and corpora stay
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
		echo "$(PYTHON) was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version), but 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are files that are touched after an install, so that the next `make` starts at once.
$(BASE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (torch, transformers; a minute or two)"
	@$(INSTALL) -e .
	@$(COMPILE)
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (torch, transformers, test tools; a minute or two)"
	@$(INSTALL) -e '.[dev,data,eval,serving,convert]'
	@$(COMPILE)
	@touch $(BASE) $@
