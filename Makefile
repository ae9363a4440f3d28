# On a machine with Python >= 3.11 and make, every target sets up $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The newest jax of each Python differs, and so do the pins.
PINS ?= constraints/$(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")').txt
WORKERS ?= 2

.PHONY: train turns test test-slow test-all lint bench real gpu docs

train: $(VENV)/installed
	$(BIN)/python -m launch.train tiny $(ARGS)

turns: $(VENV)/installed
	$(BIN)/python -m launch.train guessing $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

# The suite under each of these that the machine has: Python, and the pins of its jax. Fails if it has none of them.
test-all:
	@ran=; for run in "python3.11 py311" "python3.12 py311" "python3.12 py312"; do \
		set -- $$run; \
		if ! command -v $$1 >/dev/null; then echo "$$1 is not installed: skipped"; continue; fi; \
		echo "== $$1 with constraints/$$2.txt"; \
		$(MAKE) test PYTHON=$$1 VENV=.venv-$$1-$$2 PINS=constraints/$$2.txt || exit 1; \
		ran=yes; \
	done; \
	test -n "$$ran" || { echo "nothing was tested: install python3.11 or python3.12" >&2; exit 1; }

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

# Needs the network once, to install the extra.
docs: $(VENV)/docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks.bench $(ARGS)

# A published model, from its weights to the table of whole steps, on 2 cores. Goes on where it stopped;
# `rm -r build/real` starts again.
real: $(VENV)/real
	$(BIN)/python -m benchmarks.real $(ARGS)

gpu: $(VENV)/cuda
	$(BIN)/python -m benchmarks.gpu $(ARGS)

$(VENV)/installed: pyproject.toml $(PINS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "specjax needs Python >= 3.11, set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[dev]'
	touch $@

$(VENV)/docs: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[docs]'
	touch $@

$(VENV)/cuda: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[cuda]'
	touch $@

# Why google-tunix comes without what it asks for: see the extra in pyproject.toml.
$(VENV)/bench: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[bench]'
	$(BIN)/pip install --quiet --constraint $(PINS) --no-deps google-tunix
	touch $@

$(VENV)/real: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint $(PINS) --editable '.[real]'
	touch $@
