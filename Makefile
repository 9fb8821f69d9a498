# Two commands matter: `make run` trains a network, `make test` tests the project. They need Python 3.11 or newer with
# pip and venv, and nothing else. `make help` lists the rest. An installed state is remembered by a stamp in $(VENV):
# a second call installs nothing unless pyproject.toml has changed.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test processes: one a core, at most eight (each loads torch). Every process computes on one thread, or they would
# take each other's cores.
PYTEST_ARGS ?= -n auto --maxprocesses=8 --dist loadfile

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
ifneq ($(filter /%,$(VENV)),)
ABSOLUTE_BIN := $(BIN)
else
ABSOLUTE_BIN := $(CURDIR)/$(BIN)
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help run install test test-slow test-all lint check format-check spelling types format docs bench build clean

help: ## List the commands
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:[^#]*##/:/' | awk -F': ' '{printf "make %-14s %s\n", $$1, $$2}'

run: $(VENV)/.installed ## Train the default, handwritten digits; make run ARGS="max_epochs=2" changes options
	$(BIN)/python -m safe_trainer $(ARGS)

install: $(VENV)/.installed ## Create .venv and install the package, editable

test: $(VENV)/.installed-test ## Run the fast tests
	$(PYTEST) $(PYTEST_ARGS) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test ## Run only the slow tests, packaging among them
	$(PYTEST) $(PYTEST_ARGS) -m slow $(ARGS)

test-all: $(VENV)/.installed-test ## Run all tests
	$(PYTEST) $(PYTEST_ARGS) $(ARGS)

lint: check format-check spelling types ## Run ruff, codespell and mypy

check: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .

format-check: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format --check .

spelling: $(VENV)/.installed-dev
	$(BIN)/codespell

# A type checker cannot see that utils/ is safe_trainer.utils: it checks a fresh installed copy. build/lib goes first,
# since setuptools would install from there what has long been deleted.
types: $(VENV)/.installed-dev
	rm -rf build/lib build/typing
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/typing .
	cd build/typing && $(ABSOLUTE_BIN)/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p safe_trainer
	cd build/typing && $(ABSOLUTE_BIN)/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache ../../docs/make_configuration.py ../../docs/make_faults.py

format: $(VENV)/.installed-dev ## Format the code and mend what ruff can mend
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(VENV)/.installed ## Make the pages that are made from the code
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_faults.py

bench: $(VENV)/.installed-bench ## Compare the cost of the loop with plain PyTorch, Lightning and Ignite
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loop.py $(ARGS)

build: $(VENV)/.installed-test ## Build sdist and wheel into dist/
	$(BIN)/python -m build --no-isolation

clean: ## Remove what was built; .venv stays
	rm -rf build dist *.egg-info

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed (got %d.%d): make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.created pyproject.toml
	$(PIP) install --editable ".[$*]"
	@touch $@ $(VENV)/.installed
