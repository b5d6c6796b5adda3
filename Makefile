# Everything runs in .venv. PYTHON is the interpreter that creates it; TORCH is installed only if it has no torch >= 2.11.
PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
MUTANTS_ARGS ?=
# Processes that the files of tests are shared among: 0 runs them one after another, auto takes one a core.
WORKERS ?= auto
PYTEST := pytest -n $(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
BIN := .venv/bin
STAMP := .venv/.lading-installed
# Bytecode, once: in a fresh clone every process of the tests would make all of it at the same time.
COMPILE := $(BIN)/python -m compileall -q -j 0 src tools tests

.PHONY: venv demo test check mutants docs format clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Lading needs Python >= 3.11; run: make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" 2>/dev/null \
		|| $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/lading demo $(DEMO_ARGS)

test: venv
	$(COMPILE)
	$(BIN)/python -m $(PYTEST) $(PYTEST_ARGS)

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tools.mutants --check
	$(COMPILE)
	$(BIN)/python -m $(PYTEST) -m "not gpu and not multi_gpu and not slow" $(PYTEST_ARGS)

# Plausible faults, one at a time in a copy of the code: do the tests notice? Half an hour; MUTANTS_ARGS="planner --lived" for some.
mutants: venv
	$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)
	$(BIN)/python -m tools.mutants --report docs/mutants.md

# The site, out/docs/index.html; a warning, such as a link to nothing, is an error.
docs: venv
	$(BIN)/python -c "import furo, myst_parser, sphinx_copybutton" 2>/dev/null || $(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -q docs out/docs

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv out build dist
