# make demo: make the environment, install, run the main job end to end.   make test: lint, types and all tests.   make test-cuda: what needs a GPU.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-cuda lint bench clean

demo: .venv/ready
	$(BIN)/python -m training.demo demo

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-cuda: .venv/ready
	CKPT_DEVICE=cuda $(BIN)/python -m pytest tests/test_cuda.py tests/dist/test_manager.py -k "not accelerate and not stock_checkpoint and not flattened" tests/training/test_training.py::test_every_option_has_the_losses_of_a_plain_loop

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
