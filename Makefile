# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One more than the cores that it is meant for: the tests of deployments mostly wait. Each computes with one thread, or their threads
# would wait for one another.
WORKERS ?= 3
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: venv demo test test-long coverage docs lint wheel wheel-check release container-check mutants clean help

help:
	@echo "make demo     install, run the paper's synthetic experiments, name the report"
	@echo "make test     install, run the whole test suite"
	@echo "make test-long  the same at full size: longer fuzzing, more kills, real two-party deployments"
	@echo "make coverage the same under coverage.py, with a summary (about a fifth slower)"
	@echo "make docs     the site, in site-build/: links, names and code blocks are checked, notebooks run, no network is needed"
	@echo "make lint     ruff and mypy"
	@echo "make wheel    the wheel and the source distribution, in dist/"
	@echo "make wheel-check  the wheel in a clean environment: install it, run the demo, a Flower app and a report"
	@echo "make release  wheel and source distribution of the commit, checked in clean environments, with notes, bill of materials and checksums (DRY=1 rehearses)"
	@echo "make container-check  follow the Containerfile's lines without a container"
	@echo "make mutants  how many planted mistakes the tests notice (about 25 minutes; FILES=accounting/ledger.py COUNT=40 for less)"
	@echo "make venv     only make the virtual environment"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 && P=$(PYTHON) || P=python3; \
	  test -x $(BIN)/python || $$P -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	# torch first and exactly: a looser request may bring gigabytes of accelerator packages along.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[flower,secure,dev]"
	touch $(STAMP)

demo: venv
	$(BIN)/dpfedexp demo --out demo

# With COVERAGE=1, as continuous integration runs it, a summary of what the tests reached comes last. On Python 3.11 tracing costs
# about a fifth of the suite's CPU time, so it is not the default.
test: venv
	$(TESTS) $(if $(COVERAGE),--cov --cov-report=)
	$(if $(COVERAGE),@$(BIN)/python -m tests.covered)

coverage:
	@$(MAKE) --no-print-directory test COVERAGE=1

# All that is too long for every day: real deployments with their failures, full sizes of statistical tests and fuzzers.
test-long: venv
	DPFEDEXP_SLOW=1 $(TESTS)

# What only the site needs is installed when it is first built.
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

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
	$(BIN)/python -m tests.installed dist/*.whl

# Nothing is uploaded. DRY=1 takes an undated or unclean state, LARGE=1 also checks torches that bring gigabytes along.
release: venv
	$(BIN)/python -m tests.release $(if $(DRY),--dry) $(if $(LARGE),--large)

container-check: venv
	$(BIN)/python -m tests.release.container

# Planted mistakes in the privacy-relevant files. It goes on where it stopped, and fails below 95%.
mutants: venv
	$(BIN)/python -m tests.mutation $(FILES) $(if $(COUNT),--count $(COUNT)) --workers $(WORKERS)

clean:
	rm -rf $(VENV) demo build dist site-build .pytest_cache .mypy_cache .ruff_cache .hypothesis
