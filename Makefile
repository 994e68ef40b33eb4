# Needs Python >= 3.10 and make; everything else goes into .venv. `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
# Installed first, and only where there is no torch yet. May hold options: TORCH="torch --index-url ..."
TORCH  ?= torch==2.13.0
# Two workers, because many tests wait for processes that they start; tests that share a costly fixture stay together.
PYTEST ?= -n 2 --dist loadgroup

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check style bench clean

help:
	@echo "make demo    train a small network on handwritten digits, test it, load it again"
	@echo "make test    check style, types and layers, and run all tests"
	@echo "make check   style, types and layers only"
	@echo "make style   format the code and mend what the linter can"
	@echo "make bench   run the benchmarks (on a machine that does nothing else)"
	@echo "make clean   remove .venv, caches and what the demo left"

demo: $(VENV)/.demo
	$(VENV)/bin/leyden demo

# One thread for each test process: two of them share the cores, and waiting threads would only burn them.
test: check
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST)

check: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) -m pytest -q tests/test_layers.py

style: $(VENV)/.dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(VENV)/.bench
	$(PY) benchmarks/step_overhead.py
	$(PY) benchmarks/import_time.py
	$(PY) benchmarks/launch_time.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache leyden-demo build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of packages: made anew when pyproject.toml changes, so the second time there is nothing to do.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[bench]"
	@touch $@ $(VENV)/.dev $(VENV)/.demo

# Alone, before the rest: so that its version is the wanted one, whatever the others ask for.
$(VENV)/.torch: $(VENV)/.created
	$(PY) -c "import torch" 2>/dev/null || $(PIP) install $(TORCH)
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Leyden needs Python 3.10 or newer, and $(PYTHON) is not: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
