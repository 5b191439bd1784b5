# `make` prints this file's targets. Needs Python >= 3.10, git and make; everything else goes into .venv.
.DEFAULT_GOAL := help
.PHONY: help compare test test-full test-timm check gpu-check kernels triton lint clean always
.SUFFIXES:

# What a user's shell may carry must not reach the tests or the tables.
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE PYTHONWARNINGS PYTEST_ADDOPTS PYTEST_PLUGINS ATTNLAB_REGISTRY ATTNLAB_TRUST

# The first that exists, runs (a version manager's stand-in may not), has venv and fits the pinned torch.
PROBE := import sys, venv, ensurepip; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 14)))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.10 python3.14 python; do \
	"$$p" -c '$(PROBE)' >/dev/null 2>&1 && echo "$$p" && break; done)
endif

BIN := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Set up again where the checkout was moved or the environment's Python is gone.
stale = $(shell test -f $(1)/attnlab.stamp && test "$$(cat $(1)/attnlab.stamp)" = "$$(pwd -P)" && $(1)/$(BIN)/python -c '' 2>/dev/null || echo always)
VENV := .venv
RUN := $(VENV)/$(BIN)/python
STAMP := $(VENV)/attnlab.stamp
TIMM := .timm
TIMM_STAMP := $(TIMM)/attnlab.stamp

NAMES ?= *
ARGS ?=

help:
	@echo 'make compare    set up once, then print the table of all variants (ARGS="..." are passed on)'
	@echo 'make test       set up once, then run the tests (ARGS="..." are passed on to pytest)'
	@echo 'make test-full  the tests and the long checks'
	@echo 'make test-timm  the tests of timm models, with timm and torchvision in a folder of their own (11 MB to download)'
	@echo 'make check      the conformance checks of all variants, or NAMES="flash additive"'
	@echo 'make kernels    compile the Triton kernels for GPUs that need not be there: registers, shared memory, spills (Linux)'
	@echo 'make gpu-check  sets nothing up: checks and speed on a CUDA device, by PYTHON and its own torch (ARGS="...")'
	@echo 'make lint       ruff and mypy --strict'
	@echo 'make clean      remove the environments and the caches; run folders stay'
	@echo 'PYTHON=...      choose the interpreter that makes the environment (now: $(or $(PYTHON),none found))'

compare: $(STAMP)
	@$(RUN) -m attnlab compare $(ARGS)

# No set-up and no installation: the interpreter's own packages, and whatever else its user has on PYTHONPATH.
gpu-check:
	@PYTHONPATH='$(CURDIR)/core:$(CURDIR)/plugins:$(CURDIR)/evaluations$(if $(PYTHONPATH),:$(PYTHONPATH))' \
		'$(or $(PYTHON),python3)' -m attnlab gpu-check $(ARGS)

test: $(STAMP)
	@$(RUN) -m pytest -q -n 2 --dist loadfile -m 'not full' $(ARGS)

test-full: $(STAMP)
	@$(RUN) -m pytest -q $(ARGS)

# torchvision's operators load beside its own build of torch alone; the tests stand in for those that an import asks for. transformers would
# import a torchvision that is installed, so that timm and torchvision are kept out of $(VENV).
test-timm: $(TIMM_STAMP)
	@PYTHONPATH='$(TIMM)' $(RUN) -m pytest -q tests/core/integrations/test_timm.py $(ARGS)

check: $(STAMP)
	@$(RUN) -m attnlab check $(foreach name,$(NAMES),'$(name)') $(ARGS)

kernels: triton
	@$(RUN) -m attnlab_plugins.flash.kernels_report $(ARGS)

# CUDA builds of torch 2.13 bring this release; beside a CPU build it is a download of 0.2 GB, for Linux only.
triton: $(STAMP)
	@$(RUN) -c 'import triton' 2>/dev/null || $(RUN) -m pip install -q --no-user 'triton==3.7.1'

lint: $(STAMP)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

clean:
	rm -rf $(VENV) $(TIMM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find core plugins evaluations tests -name __pycache__ -type d -prune -exec rm -rf {} +

PYTHON_THERE = test -n '$(PYTHON)' || { echo 'attnlab needs Python 3.10 to 3.14 with venv (Debian and Ubuntu: apt install python3-venv); make PYTHON=/path/to/python names one' >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt .ci/setup_environment.py $(call stale,$(VENV))
	@$(PYTHON_THERE)
	@'$(PYTHON)' .ci/setup_environment.py

$(TIMM_STAMP): $(STAMP) .ci/timm.txt
	@rm -rf $(TIMM)
	@$(RUN) -m pip install -q --disable-pip-version-check --no-user --no-deps --target $(TIMM) -r .ci/timm.txt
	@touch $(TIMM_STAMP)
