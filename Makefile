# make demo        make the environment, install, and run the main job end to end
# make test        lint, types and the quick tests: each feature once
# make test-slow   kills, outages, attacks and sweeps that take longer
# make test-all    both
# make test-peers  tests with other programs, each in an environment of its own (.peers)
# make test-cuda   what needs a GPU
# make docs        build the documentation site: build/site
# make man         write the man page: docs/reference/ckpt.1
# make dist        build sdist and wheel: build/dist
# without compiled files, each of the many processes of the tests compiles the package anew
export PYTHONDONTWRITEBYTECODE =
PYTHON ?= python3
BIN := .venv/bin
# one thread per process: the test processes share two cores, and some of them wait for servers
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadgroup

.PHONY: demo test test-slow test-all test-peers test-cuda lint docs man pictures dist bench bench-check clean

demo: .venv/ready
	$(BIN)/python tests/demo.py demo

test: lint
	$(PYTEST) --numprocesses 4 --ignore tests/peers -m "not slow"

test-slow: .venv/ready
	$(PYTEST) --numprocesses 4 --ignore tests/peers -m slow

test-all: test test-slow

test-peers: .venv/ready
	$(PYTEST) --numprocesses 2 tests/peers

test-cuda: .venv/ready
	CKPT_DEVICE=cuda $(BIN)/python -m pytest --numprocesses 6 tests/test_cuda.py tests/dist/test_manager.py -k "not accelerate and not stock_checkpoint and not flattened" tests/training/test_training.py::test_every_option_has_the_losses_of_a_plain_loop

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/typer ckpt_tools.cli.app utils docs --name ckpt --output docs/reference/command.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file .mkdocs.yml

man: .venv/ready
	$(BIN)/python -m ckpt_tools.cli.man > docs/reference/ckpt.1

dist: .venv/ready
	$(BIN)/python -m build --outdir build/dist .

pictures: .venv/ready
	$(BIN)/python docs/pictures.py build/pictures --docs

bench: .venv/ready
	$(BIN)/python tests/benchmarks/compare.py

bench-check: .venv/ready
	$(BIN)/python tests/benchmarks/check.py

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .peers demo build *.egg-info
