# train   the first run: digits, on whatever this machine has
# test    checks, then tests; THOROUGH=1 for all of them, THOROUGH=quarter for what CI runs
# docs    the pages of docs/ as a site in site/VERSION, with the Python interface and every command; loads nothing from elsewhere
# labs    the course: writes lab 1 into course/ (once) and opens it in Jupyter, which also prints its URL
# .venv   the environment only; built again whenever pyproject.toml, constraints.txt or compiled code changes

PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.built
LOG    := .venv-setup.log
# Installs the extra $(2) unless its module $(1) can be imported.
EXTRA   = $(VENV)/bin/python -c 'import $(1)' 2>/dev/null || { echo "Installing the extra $(2) …" >&2; \
    $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[$(2)]'; }

.PHONY: train test check docs labs clean .venv
.DEFAULT_GOAL := train

train: $(STAMP)
	@$(VENV)/bin/paceline train digits

test: check
	@THOROUGH=$(THOROUGH) scripts/test

check: $(STAMP)
	@scripts/check

docs: $(STAMP)
	@$(call EXTRA,mkdocstrings_handlers.python,docs)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo "Look at it: $(VENV)/bin/python -m http.server --directory site --bind 127.0.0.1"

labs: $(STAMP)
	@$(call EXTRA,jupytext,labs)
	@[ -e course/1_scaling_training.ipynb ] || $(VENV)/bin/paceline labs start 1 course --no-open >/dev/null
	@echo "Opening lab 1, course/1_scaling_training.ipynb. If no browser opens, open a URL below. Ctrl+C twice stops it."
	@echo "Check your exercises: $(VENV)/bin/paceline labs check 1 course/1_scaling_training.ipynb"
	@$(VENV)/bin/jupyter lab --log-level=CRITICAL course/1_scaling_training.ipynb

$(VENV): $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/paceline/data/image/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is missing or older than 3.11. Name a newer one: make PYTHON=python3.12 …" >&2; exit 1; }
	@echo "Setting up $(VENV) (about two minutes, once) …" >&2
	@{ $(PYTHON) -m venv $(VENV) && \
	   $(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'; } >$(LOG) 2>&1 || \
	    { tail -n 30 $(LOG) >&2; echo "Setting up $(VENV) failed; the whole log is in $(LOG)." >&2; exit 1; }
	@touch $@

clean:
	@rm -rf $(VENV) $(LOG) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@find src -name '*.so' -type f -delete
	@find src -name '*.egg-info' -type d -prune -exec rm -rf {} +
