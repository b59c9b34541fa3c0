# Needs only Python >= 3.11 and make; everything else goes into .venv, at the versions in constraints.txt.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
DATA ?=
OUT ?= reproduced
export GOMP_SPINCOUNT ?= 1000# threads wait briefly, as src/bayesrnn/starting.py has it

VENV := .venv
PY := $(VENV)/bin/python
SOURCES := src tests results $(wildcard docs/*.py examples benchmarks)

.PHONY: help test check demo reproduce results reference format clean .ptb FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: check ## check style and types, then run every test (JOBS=2)
	@$(PY) -m pytest -q -rs -n $(JOBS)

check: $(VENV)/.dev ## check style and types only
	@$(PY) -m ruff check --quiet --output-format concise $(SOURCES)
	@$(PY) -m ruff format --check --quiet $(SOURCES) || { echo "The files above need: make format" >&2; exit 1; }
	@$(PY) -m mypy

demo: $(VENV)/.demo ## train and question a small Bayesian network; ends with a report page (ARGS="...")
	@$(PY) examples/demo.py $(ARGS)

reproduce: .ptb $(VENV)/.dev ## train and measure every row of the Penn Treebank tables (DATA=... OUT=... ARGS="...")
	@$(PY) benchmarks/reproduce.py --data "$(DATA)" --out "$(OUT)" $(ARGS)

.ptb:
	@test -d "$(DATA)" || { echo "Where is the Penn Treebank? make reproduce DATA=/path/to/ptb" >&2; exit 2; }

results: ## write RESULTS.md and README's tables from results/summary.json
	@$(PYTHON) results/make_tables.py

reference: $(VENV)/.dev ## write docs/reference.md from the docstrings
	@$(PY) docs/make_reference.py

format: $(VENV)/.dev ## put the code in the standard format
	@$(PY) -m ruff check --fix --quiet $(SOURCES)
	@$(PY) -m ruff format --quiet $(SOURCES)

clean: ## remove .venv, caches and build output
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests results $(wildcard examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp a set of packages. An install that was interrupted leaves .venv/.busy behind, and a
# .venv without its .made stamp was never finished: either way it is made anew.
$(VENV)/.dev $(VENV)/.demo: $(VENV)/.%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing the pinned packages into $(VENV) (minutes the first time) ..."
	@touch $(VENV)/.busy
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@rm $(VENV)/.busy
	@touch $@

$(VENV)/.made: $(if $(wildcard $(VENV)/.busy),FORCE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "bayesrnn needs Python >= 3.11, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true); try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@
