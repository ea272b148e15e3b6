# Everything runs in .venv, made here on first use. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
PAGE := steplab-run/report.html
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
export STEPLAB_STORE := steplab-run/store.db
# Of what is installed a small part is imported, and compiled then.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run test tests test-integrations check fuzz format docs release clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: .venv/installed ## Measure a tiny model on this machine, end to end, in a few minutes: its answers, and a page
	@mkdir -p $(dir $(PAGE))
	$(BIN)/steplab study quick --output $(PAGE)

# Side by side: linting and types need less than the tests, the rest of which is installed meanwhile.
test: .venv/checked ## Lint, type-check and run the tests
	@$(MAKE) --no-print-directory --jobs 2 check tests

tests: .venv/tested
	$(BIN)/pytest -n 3 --dist worksteal

test-integrations: .venv/integrated ## Run the tests of trainers, trackers and data frames, with libraries that take long to install
	$(BIN)/pytest tests/integrations tests/unit/test_data_out.py

check: .venv/checked ## Lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: .venv/tested ## Attack every reader with new tries for an hour; MINUTES=5 SEED=7 for other figures
	$(BIN)/python -m tests.fuzz.attack --times 1000 --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1) --keep steplab-run/fuzz

format: .venv/checked ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/documented ## Build the documentation as a site: site/index.html
	$(BIN)/python docs/gallery/make.py
	$(BIN)/mkdocs build --strict --quiet

release: .venv/tested ## Run all tests, long ones too; build wheel and sdist in dist/ and try both in a clean environment
	$(BIN)/pytest -m 'release or not release' -n 3 --dist worksteal
	$(BIN)/python -m hatchling build --clean -d dist

clean: ## Remove the environment and what `make run` and `make docs` made
	rm -rf .venv steplab-run site dist

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "steplab needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --upgrade-deps .venv
	touch $@

.venv/installed: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable . --constraint constraints.txt
	touch $@

.venv/checked: .venv/made pyproject.toml constraints.txt
	$(INSTALL) --editable '.[check]' --constraint constraints.txt
	touch .venv/installed $@

.venv/tested: .venv/checked
	$(INSTALL) 'steplab[dev]' --constraint constraints.txt
	touch $@

.venv/documented: .venv/installed
	$(INSTALL) --editable '.[docs]' --constraint constraints.txt
	touch $@

# torchtitan by itself: it bounds what the others leave open, so that pip would search for long or take an older one.
.venv/integrated: .venv/tested
	$(INSTALL) --editable '.[integrations]' --constraint constraints.txt
	$(INSTALL) 'torchtitan>=0.3' --constraint constraints.txt
	touch $@
