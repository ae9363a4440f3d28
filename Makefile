# On a machine with Python >= 3.11 and make, every target sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# The newest jax of each Python differs, and so do the pins.
PINS := constraints/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
WORKERS ?= 2

.PHONY: train test test-slow lint bench

train: .venv/installed
	$(BIN)/python -m launch.train tiny $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-slow: .venv/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: .venv/bench
	$(BIN)/python -m launch.bench $(ARGS)

.venv/installed: pyproject.toml $(PINS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "specjax needs Python >= 3.11, set PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[dev]'
	touch $@

# Why google-tunix comes without what it asks for: see the extra in pyproject.toml.
.venv/bench: .venv/installed
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[bench]'
	$(BIN)/pip install --quiet --constraint $(PINS) --no-deps google-tunix
	touch $@
