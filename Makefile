# make demo    set up, then translate with the built-in model, generate a corpus, train on it and show the attention
# make test    set up, then lint, check types and run the tests
# make setup   only create .venv with the command in it
# make page    build the explorer page: dragoman/explore/static from its sources in dragoman/explore/page
# make docs    set up, then generate docs/settings.md and build the site with the API reference into site/
# make test-gpu  run the tests that need a GPU or Triton; installs nothing: make GPU_PYTHON=python3 test-gpu

PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests
# GPU machines often come with their own PyTorch and no network, so test-gpu uses neither .venv nor pytest's plugins.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_WORKERS ?= 4

.PHONY: setup demo page test chromium test-gpu test-slow lint types format docs clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Dragoman needs Python 3.11 or later; found $$($(PYTHON) --version); try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m compileall -q dragoman
	@touch $@

demo: setup
	$(BIN)/dragoman demo

page: setup
	$(BIN)/python tools/build_explorer_page.py

test: lint types chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(TESTS)

# The browser of tests/browser: installed where that needs no prompt, else those tests are skipped.
chromium:
	@tools/install_chromium.sh

test-gpu:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
		{ echo "test-gpu needs a GPU that PyTorch can use; found none with $(GPU_PYTHON); try make GPU_PYTHON=python3 test-gpu"; exit 1; }
	@workers=$$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo "-n $(GPU_WORKERS) --dist worksteal"); \
		set -x; OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest $$workers --durations 10 -m "gpu or triton" $(TESTS)

test-slow: setup
	$(BIN)/python -m pytest -m slow -s $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A broken link, a page that the navigation lacks or a reference that does not resolve fails the build.
docs: .venv/docs-installed
	$(BIN)/python tools/settings_page.py
	$(BIN)/mkdocs build --strict

.venv/docs-installed: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .hypothesis
