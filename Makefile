# Every target does its own set-up: it needs only Python 3.11+ and pip.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
OUT    ?= demo
# Two test processes of one thread each: torch's idle threads otherwise spin and slow the other process down.
QUIET  := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

.PHONY: demo demo-quick test test-slow test-slurm lint clean

demo: $(READY)
	$(BIN)/clip-linear demo --out $(OUT)

demo-quick: $(READY)
	$(BIN)/clip-linear demo --quick --out $(OUT)-quick

test: $(READY)
	$(QUIET) $(BIN)/python -m pytest -n 2 -m "not slow and not slurm and not gpu"

test-slow: $(READY)
	$(QUIET) $(BIN)/python -m pytest -n 2 -m "slow and not slurm and not gpu"

test-slurm: $(READY)
	tests/slurm/run $(BIN)/python

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clip_linear needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; run: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist demo demo-quick
