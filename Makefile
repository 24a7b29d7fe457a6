# Each target sets up what it needs: a machine with Python and make is enough. Re-running is quick.
#   make test    all tests            make demo    kill a training run twice, resume, compare bit for bit
#   make check   lint, types, layers  make bench   measure, as docs/benchmarks.md says
#   make docs    the documentation as a site, in .site
#   make compat  the tests under every supported torch (some 5 GB of downloads for each); writes docs/compat.md
#   make fault-long   SIGKILL a saving process 200 times; the result goes to docs/faults.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

export OMP_NUM_THREADS := 1

.PHONY: test check demo bench docs fault-long compat format clean

test: $(READY)
	$(BIN)/pytest -n $(WORKERS) $(TESTS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(READY)
	$(BIN)/python examples/demo.py $(DEMO)

bench: $(READY)
	for each in step pipeline load save reshard verify; do $(BIN)/python benchmarks/$$each.py || exit 1; done

docs: $(VENV)/.docs-ready
	$(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' -c constraints.txt
	touch $@

fault-long: $(READY)
	$(BIN)/python -m tests.fault.kills --report docs/faults.md $(KILLS)

compat:
	$(PYTHON) scripts/compat.py $(COMPAT)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is pinned first and alone: a bare "torch" would fetch a CUDA build of several GB.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) numpy -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $(READY)

clean:
	rm -rf $(VENV) .demo .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
