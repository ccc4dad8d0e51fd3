# `make` prints the targets. Everything runs through Nox, which .venv holds; nothing is installed anywhere else.

PYTHON ?= python3
NOX := .venv/bin/nox
# Every Nox session calls uv by name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup test e2e learn ci-short ci-long doctor clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(NOX)  ## .venv with Nox and uv, nothing else

$(NOX): locks/setup.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, this is {v[0]}.{v[1]}; name another: make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement locks/setup.txt
	@touch $(NOX)

test: $(NOX)  ## lint, types, fast tests, tests that need torch
	$(NOX) -s lint types fast stack contract

e2e: $(NOX)  ## the whole job on this machine, two steps
	$(NOX) -s e2e_verifiers

learn: $(NOX)  ## the whole job, twenty steps, after which it must have learned
	$(NOX) -s e2e_verifiers -- --profile cpu-learn

doctor: $(NOX)  ## what this machine has, and what is missing
	$(NOX) -s doctor

ci-short: $(NOX)  ## what every commit must pass
	$(NOX) -s lint types fast stack contract prepare convert e2e_verifiers

ci-long: ci-short  ## the same on every Verifiers version, in faults, on a frozen image, and that it learns
	$(NOX) -s compat faults frozen
	$(MAKE) learn

clean:  ## remove .venv, Nox's venvs and tool caches; runs and the shared cache stay
	rm -rf .venv .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
