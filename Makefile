# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two test processes on two cores: more threads would only wait for one another. What Python
# compiles is kept, whatever the environment says: pytest's rewritten assertions take 5 s per process.
SERIAL := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test test-all test-deps lint prove docs figures release-check clean

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) '.[app]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) '.[dev]'
	touch $@

demo: $(VENV)/installed  ## private training on scikit-learn's digits, several methods side by side
	$(BIN)/python -m dpbam demo

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-deps:  ## what some tests need of the system: a browser and its driver, and the command ip
	tools/test_deps.sh

test: lint  ## everything that continuous integration runs
	$(SERIAL) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

test-all: lint  ## the slow tests too, and a floor under what the tests reach of the code
	$(SERIAL) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --cov

prove: $(VENV)/installed-dev  ## plant every mistake and see it caught; attack the code as it is
	$(SERIAL) $(BIN)/python tests/claims/prove.py --jobs 2 --out benchmarks/results/prove.json

docs: $(VENV)/installed-dev  ## the documentation's site, strictly, into site/; it opens from disk
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

figures: $(VENV)/installed-dev  ## the documentation's pictures and tables, from the records in reproduce/results/
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/choosing.py

release-check: $(VENV)/installed-dev  ## sdist and wheel, checked and tried in an empty environment
	$(INSTALL) '.[release]'
	tools/check_release.sh $(BIN)/python

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
