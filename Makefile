# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One more than the cores that it is meant for: the tests of deployments mostly wait. Each computes with one thread, or their threads
# would wait for one another.
WORKERS ?= 3
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: venv demo test test-long coverage docs lint wheel wheel-check flower-versions release mutants clean help

help:
	@echo "make demo     install the package, run the paper's synthetic experiments, name the report"
	@echo "make test     install the rest, run the whole test suite"
	@echo "make test-long  the same at full size: longer fuzzing, more kills, real deployments, the oldest and newest Flower"
	@echo "make coverage the same under coverage.py, with the lines reached in every file"
	@echo "make docs     the site, in site-build/: links, names and code blocks are checked, notebooks run, no network is needed"
	@echo "make lint     ruff and mypy"
	@echo "make wheel    the wheel and the source distribution, in dist/"
	@echo "make wheel-check  the wheel in a clean environment: install it, run the demo, a Flower app and a report"
	@echo "make flower-versions  the tests of Flower with the lowest and the newest version that is asked for"
	@echo "make release  wheel and source distribution of the commit, checked in clean environments, with notes, bill of materials and checksums (DRY=1 rehearses)"
	@echo "make mutants  how many planted mistakes the tests notice (about 25 minutes; FILES=accounting/ledger.py COUNT=40 for less)"
	@echo "make venv     only make the virtual environment"

venv: $(VENV)/.tools

# The package alone, which is all that the demo needs. torch first and exactly: a looser request may bring gigabytes of accelerator
# packages along.
$(VENV)/.package: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 && P=$(PYTHON) || P=python3; \
	  test -x $(BIN)/python || $$P -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e .
	touch $@

# Flower, and what the tests and the linters need.
$(VENV)/.tools: $(VENV)/.package
	$(PIP) -c constraints.txt -e ".[flower,secure,dev]"
	touch $@

# What only the site needs.
$(VENV)/.docs: $(VENV)/.tools
	$(PIP) -c constraints.txt -e ".[docs]"
	touch $@

demo: $(VENV)/.package
	$(BIN)/dpfedexp demo --out demo

test: venv
	$(TESTS)

# Lines that only processes run which tests start (the command line, ranks, Flower) are not counted: the figures are lower bounds.
coverage: venv
	$(TESTS) --cov --cov-report=term:skip-covered

# All that is too long for every day: real deployments with their failures, full sizes of statistical tests and fuzzers.
test-long: venv
	DPFEDEXP_SLOW=1 $(TESTS)
	$(MAKE) --no-print-directory flower-versions

# The tests of Flower that start no processes, with the lowest and the newest version that pyproject.toml admits.
flower-versions: venv
	$(BIN)/python -m tests.release.flower

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore::DeprecationWarning $(BIN)/mkdocs build
	DPFEDEXP_SITE=site-build $(BIN)/python -m pytest -q tests/site
	@echo "site-build/index.html"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is built from the source distribution, so what is missing from that is missed here. build/ and egg-info may hold files of
# an earlier state of the tree, which setuptools would take along.
wheel: venv
	rm -rf build dist src/*.egg-info
	$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	@ls -l dist

wheel-check: wheel
	$(BIN)/python -m tests.release.installed dist/*.whl

# Nothing is uploaded. DRY=1 takes an undated or unclean state, LARGE=1 also checks torches that bring gigabytes along.
release: venv
	$(BIN)/python -m tests.release $(if $(DRY),--dry) $(if $(LARGE),--large)

# Planted mistakes in the privacy-relevant files. It goes on where it stopped, and fails below 95%.
mutants: venv
	$(BIN)/python -m tests.mutation $(FILES) $(if $(COUNT),--count $(COUNT)) --workers $(WORKERS)

clean:
	rm -rf $(VENV) demo build dist site-build .pytest_cache .mypy_cache .ruff_cache .hypothesis
