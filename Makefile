# Everything a newcomer needs. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CODE   := src tests examples scripts
# Two files of tests at a time. Each worker has a daemon of its own, so none sees the sandboxes of another.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --cache-clear
# A test that fails is run once more, alone: it passes if the machine was too busy, and is named either way.
AGAIN  := scripts/test-again $(BIN)/pytest

FAST   := tests/unit tests/contract tests/compat/test_e2b_wire.py tests/compat/test_e2b_control.py \
          tests/compat/test_e2b_envd.py tests/compat/test_e2b_ports.py tests/compat/test_e2b_snapshots.py \
          tests/compat/test_freestyle_wire.py tests/compat/test_freestyle_sockets.py
SLOW   := tests/integration tests/vm tests/web

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests demo up test test-fast test-vm test-compat lint format bench upgrade clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## Install what is missing: system packages, Python environment, base image, template
	@scripts/setup

demo: setup ## Start a daemon, create sandboxes, run things in them, print what it took
	@$(BIN)/python examples/demo.py

up: setup ## Run the daemon in the foreground
	@$(BIN)/forkyard up

test: setup-tests lint test-fast test-vm ## Everything CI runs

setup-tests:
	@scripts/setup --tests

test-fast: ## Tests without VMs: pure modules, agent on the host, API and SDK on a fake host
	@$(PYTEST) $(FAST) || $(AGAIN) $(FAST)

test-vm: ## Tests on real VMs, and in a browser
	@$(PYTEST) --no-loadscope-reorder $(SLOW) || $(AGAIN) $(SLOW)

test-compat: ## Published clients of other services against ours; writes the tables in docs/compat.md
	@scripts/compat-clients >/dev/null
	@FORKYARD_WRITE_DOCS=1 $(BIN)/pytest tests/compat

lint: ## Format, lint, types, import rules, generated files
	@$(BIN)/ruff format --check -q $(CODE) && $(BIN)/ruff check -q $(CODE)
	@$(BIN)/mypy
	@out=$$($(BIN)/lint-imports --no-cache 2>&1) || { echo "$$out"; exit 1; }
	@$(BIN)/python scripts/unasync.py --check
	@$(BIN)/python scripts/reference.py --check

format: ## Format the code and refresh generated files
	@$(BIN)/ruff format -q $(CODE) && $(BIN)/ruff check -q --fix $(CODE)
	@$(BIN)/python scripts/unasync.py
	@$(BIN)/python scripts/reference.py

bench: ## Measure everything SPECIFICATION.md promises, and write it there
	@scripts/setup --bench
	@$(BIN)/forkyard bench --write SPECIFICATION.md

upgrade: ## Take the newest Python packages; run the tests, and commit constraints.txt if they pass
	@$(BIN)/pip install -q --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	@head -1 constraints.txt >$(VENV)/constraints.txt && $(BIN)/pip freeze --exclude-editable >>$(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt && git --no-pager diff --stat constraints.txt

clean: ## Remove the Python environment (images and sandboxes stay; `forkyard down --all` ends those)
	rm -rf $(VENV) build .mypy_cache .ruff_cache .hypothesis .pytest_cache
