# make demo    set up, then make a corpus, train on it, translate and show the attention
# make test    set up, then lint, check types and run the tests
# make setup   only make .venv with the command in it

PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests

.PHONY: setup demo test test-slow lint types format docs clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Dragoman needs Python 3.11 or later; found $$($(PYTHON) --version); try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: setup
	$(BIN)/dragoman demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(TESTS)

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

docs: setup
	$(BIN)/python tools/settings_page.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
