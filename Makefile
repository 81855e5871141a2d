# make demo: make the environment, install, run the main job end to end.   make test: lint, types and all tests.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

demo: .venv/ready
	$(BIN)/python -m training.demo demo

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python tests/benchmarks/compare.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv demo build *.egg-info
