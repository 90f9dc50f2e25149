# Everything happens in .venv, which the first target that needs it makes.
#   make demo       plan a model for 8 devices, train it in 8 local processes, compare with one
#   make test       the default test suite       make test-times  the same, and what its files cost
#   make test-slow  what takes long, in 45 minutes on 2 cores; SEED=7 draws other random cases
#   make golden     write the texts of tests/golden and the pages made from the code anew, to be read as a diff
#   make check      lint, format, types, import order
#   make bench      the benchmarks, in an hour; with FULL=1 all of their cases, into docs/benchmarks.md
#   make docs       the site, into build/site    make docs-serve  the same at localhost:8000
#   make figures    the drawings of docs/    make report-picture  those of docs/report.md, with Chromium
#   make bench-gpu  what one accelerator can tell, into gpu_results/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install test test-times test-slow golden check format bench bench-gpu docs docs-serve figures report-picture demo clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	       "name another: make PYTHON=python3.12" >&2; exit 2; }
	@test ! -L $(VENV) || { \
	  echo "error: $(VENV) is a link to $$(readlink -f $(VENV)), which may serve another project:" \
	       "remove the link, or bring that one up to date there" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (once; some minutes) ..."
	@$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# A worker for each core, each on one thread; a file stays with one worker, which keeps what it starts.
# Tests of processes that die depend on time: a failed test runs once more, and is listed as RERUN.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --reruns 1

test: install
	$(PYTEST)

test-times: install
	$(PYTEST) --cpu-times 20

test-slow: install
	$(PYTEST) -m slow

golden: install
	SHARDWRIGHT_GOLDEN=write $(BIN)/python -m pytest -q tests/test_golden.py
	-git --no-pager diff --stat -- tests/golden docs src

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks $(if $(FULL),--full)

bench-gpu: install
	$(BIN)/python benchmarks/gpu.py --out gpu_results

docs: install
	$(BIN)/mkdocs build --quiet

docs-serve: install
	$(BIN)/mkdocs serve

figures: install
	$(BIN)/python docs/figures docs/images

report-picture: install
	mkdir -p build docs/images
	$(BIN)/shardwright plan configs/llama2_70b_auto.yaml --devices 64 --out build/plan.json
	$(BIN)/shardwright report build/plan.json
	for size in "1280 report" "800 report-800"; do set -- $$size; \
	  for dark in "" --force-dark-mode; do \
	    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars $$dark \
	      --window-size=$$1,1150 --screenshot=docs/images/$$2$${dark:+-dark}.png \
	      file://$(CURDIR)/build/plan.html || exit 1; \
	  done; \
	done

demo: install
	@$(BIN)/python examples/demo.py

clean:
	rm -rf build dist log_output .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
