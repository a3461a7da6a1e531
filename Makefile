# Two commands: `make train` trains the default model, `make test` checks a change. `make test-all` checks a release.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test test-all test-gpu test-vendors lint docs site clean

train: $(VENV)/installed
	$(BIN)/python -m graphmoe.train

# Bytecode is kept even where the shell says not to: or each process that starts compiles all sources.
# The seconds of every test are in build/tests.xml; the 30 largest are printed.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=30 --junitxml=build/tests.xml

test: $(VENV)/installed-dev lint
	$(PYTEST)

WHICH := slow or not slow
test-all: $(VENV)/installed-dev lint
	$(PYTEST) -m "$(WHICH)"

# On a machine with GPUs, with whatever Python has torch and pytest-xdist there: make test-gpu PYTHON=python3
test-gpu:
	$(PYTHON) -m pytest -m "gpu and not alone" -n auto --dist loadgroup
	$(PYTHON) -m pytest -m "gpu and alone"

# Calls of libraries with the library's own code; what is absent is skipped by name: make test-vendors PRIMUS_TURBO_SOURCES=CHECKOUT
export PRIMUS_TURBO_SOURCES
test-vendors: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -rs tests/vendors

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/*.Dockerfile

docs: $(VENV)/installed-dev
	$(BIN)/python docs/make_tables.py

# The documentation as a site, in build/site; a link that leads nowhere ends it.
site: $(VENV)/installed-dev
	$(BIN)/python -m pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

clean:
	rm -rf $(VENV)

# torch comes first and pinned: a CPU-only build satisfies the rest. Wheels of torch for a GPU bring their
# own triton, so it is added only where torch brought none. pip shows its progress: torch is 200 MB to 3 GB.
$(VENV)/installed: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphmoe needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e .
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q triton==3.6.0
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
