# Every target does its own set-up: a bare machine needs only make and a Python 3.11+ with venv and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := build/demo
# `make gpu` and `make bench` use the torch that PYTHON already has; GPU_VENV=1 makes them use the virtual environment.
GPU_VENV ?=
GPU_PYTHON := $(if $(GPU_VENV),$(BIN)/python,$(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help demo test programs check gpu bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## run the smoke suite on the CPU and print its eager/bcg/graph table
	@rm -rf $(DEMO)
	$(BIN)/bcgbench run --suite smoke --results $(DEMO)

test: $(STAMP) ## run the tests; those that need a GPU are skipped visibly where there is none
	$(BIN)/python -m pytest -q -rs -n logical --dist worksteal

programs: $(STAMP) ## check thousands of random programs against eager, and show of what kinds they are
	$(BIN)/python -m pytest -q -n logical --hypothesis-profile programs --hypothesis-show-statistics tests/engine/test_tape_programs.py tests/engine/test_auto_programs.py

check: $(STAMP) ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/mypy

gpu: $(if $(GPU_VENV),$(STAMP)) ## run the tests marked gpu with PYTHON's own torch
	@$(GPU_PYTHON) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { \
		echo "make gpu: $(GPU_PYTHON) has no torch that finds a CUDA device; choose one with PYTHON=..., or use make test" >&2; exit 1; }
	$(GPU_PYTHON) -m pytest -q -rs -m gpu tests/gpu

bench: $(if $(GPU_VENV),$(STAMP)) ## time the engine itself: on a GPU if PYTHON's torch finds one, within a minute
	@$(GPU_PYTHON) -c 'import torch' 2>/dev/null || { \
		echo "make bench: $(GPU_PYTHON) has no torch; choose one with PYTHON=..., or take that of .venv with GPU_VENV=1" >&2; exit 1; }
	$(GPU_PYTHON) -m benchmarks.engine

clean: ## remove the virtual environment, build output and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find bcgbench tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@echo "installing bcgbench and its pinned dependencies into $(VENV)/ (some minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "bcgbench needs Python 3.11 or newer; say which: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
