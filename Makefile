# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two test processes on two cores: more threads would only wait for one another.
SERIAL := OMP_NUM_THREADS=1

.PHONY: demo test lint prove clean

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/installed  ## private training on scikit-learn's digits, several methods side by side
	$(BIN)/python -m dpbam demo

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## everything that continuous integration runs
	$(SERIAL) $(BIN)/python -m pytest --numprocesses 2 --cov

prove: $(VENV)/installed-dev  ## plant every mistake and see it caught; attack the code as it is
	$(SERIAL) $(BIN)/python tests/privacy/prove.py --jobs 2

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
