# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs by itself; nothing outside this folder and the user's cache folder is written
# (root's container runtime goes to /var/cache, since sandboxes run as nobody and can't enter root's home).
# PYTHON=/path/to/python chooses the interpreter, PRORL_CACHE=/path the cache folder.

BIN := .venv/bin
# More than there are cores: most of the time a test waits for a container, an engine or a server.
PARALLEL := --numprocesses=4 --no-loadscope-reorder
MAKEFLAGS += --no-print-directory
# A Gym deployment is ten processes that import the same 2,000 modules: half of its time goes if none keeps the bytecode.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-dev setup-bench demo tiny-dapo test test-long lint format swe-tasks gym-matrix clean

help: ## show this text
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## environment, container runtime and sandbox image, whatever of them is missing
	@scripts/bootstrap.sh
	@$(BIN)/prorl setup

setup-dev:
	@scripts/bootstrap.sh dev
	@$(BIN)/prorl setup

setup-bench:
	@scripts/bootstrap.sh bench
	@$(BIN)/prorl setup

demo: setup ## set up, then real rollouts of a real NeMo Gym deployment (ARGS= for prorl demo)
	@$(BIN)/prorl demo $(ARGS)

tiny-dapo: ## a policy of 370,000 parameters learns to use a shell, three seeds (ARGS= for examples/tiny_dapo)
	@scripts/bootstrap.sh tiny
	@$(BIN)/prorl setup
	@$(BIN)/python -m examples.tiny_dapo $(ARGS)

test: setup-dev lint ## set up, lint, check types and import directions, run the tests (ARGS= for pytest)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-long: setup-dev ## what "test" leaves out or has a short form of; by subject: ARGS=tests/deployment (all: hours)
	@PRORL_TEST_LONG=1 $(BIN)/python -m pytest -m "long or longer" --timeout=7200 $(ARGS)

lint: ## ruff, without changing anything
	@scripts/bootstrap.sh dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: ## ruff, with its fixes
	@scripts/bootstrap.sh dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench-%: setup-bench ## measure against a named peer, see benchmarks/README.md (ARGS=--quick for the short form)
	@$(BIN)/python -m benchmarks.$* $(ARGS)

swe-tasks: setup-dev ## software-engineering tasks of well-known packages, with an image each (ARGS= for the script)
	@$(BIN)/python -m scripts.make_swe_tasks $(ARGS)

gym-matrix: setup-dev ## the wheel under Gym's command line on Gym 0.4.0 and 0.7.0 (ARGS= for other GYM=PYTHON pairs)
	@$(BIN)/python scripts/gym_matrix.py $(ARGS)

clean: ## remove the environment and build files; the cache folder stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
