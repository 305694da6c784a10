# Everything runs from .venv, which `make env` fills once; nothing is installed outside of it.
PYTHON ?= python3.11
PYTHON312 ?=
PORT ?= 30000
N ?=
QUICK ?=
CONFIG ?=
MODEL ?=
TRAJECTORY ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -qq install --no-warn-conflicts --constraint constraints.txt
# SGLang's own switch for CPU inference; without it the stand-ins of server_patch/cpu do nothing.
export SGLANG_USE_CPU_ENGINE := 1

.DEFAULT_GOAL := help
.PHONY: help env debug-gym eval-debug-gym model serve demo record test check static fuzz bench fmt clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 23
	@echo
	@echo "  Variables: PYTHON=python3.11 PYTHON312=python3.12 PORT=30000 MODEL=DIR TRAJECTORY=FILE N=8 QUICK=1 CONFIG=FILE STEPS=100000 SEED=1 LEYLINE_CACHE=~/.cache/leyline"

env: $(VENV)/.installed ## create .venv with SGLang for the CPU and everything else (about 2 minutes, 2.4 GB)

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) not found. Leyline's CPU server needs Python 3.11 (the only one it is tested on)." >&2; \
	  echo "make: install it, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), expected Python 3.11; say PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "env: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: constraints.txt pyproject.toml server_patch/cpu/pyproject.toml server_patch/cpu/requirements-no-deps.txt | $(BIN)/pip
	@echo "env: 1/3 build tool"
	@$(PIP) hatchling
	@echo "env: 2/3 torch, what SGLang needs on a CPU, this project and its development tools (a minute or two)"
	@$(PIP) --no-build-isolation --editable server_patch/cpu --editable '.[dev]'
	@echo "env: 3/3 SGLang, without its CUDA dependencies"
	@$(PIP) --no-deps --requirement server_patch/cpu/requirements-no-deps.txt
	@touch $@
	@echo "env: ready in $(VENV)"

# debug-gym needs another Python. pyenv's `python3.12` may be there and not run, so each is tried.
GYM := .venv-debug-gym
GYM_PYTHON = $(shell for python in $(PYTHON312) python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python3.12; do \
  "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$python" && break; done)

debug-gym: $(GYM)/.installed ## create .venv-debug-gym, with debug-gym on a Python 3.12 (20 s, 240 MB)

$(GYM)/.installed: evals/debug_gym_env/requirements.txt
	@python="$(GYM_PYTHON)"; if [ -z "$$python" ]; then \
	  echo "make: no Python 3.12 found, which debug-gym needs; say where it is: make debug-gym PYTHON312=/path/to/python3.12" >&2; \
	  exit 1; fi; \
	echo "debug-gym: creating $(GYM) with $$python"; "$$python" -m venv --clear $(GYM)
	@$(GYM)/bin/pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

# Its errors (1) do not keep the report from being written.
EVAL_CONFIG = $(or $(CONFIG),debug_gym_$(if $(QUICK),quick,full))
EVAL_OUT = build/solve_rate/$(basename $(notdir $(EVAL_CONFIG)))

eval-debug-gym: env debug-gym ## run a scripted agent in debug-gym, in all arms, and report: make eval-debug-gym [QUICK=1] [CONFIG=FILE]
	@$(BIN)/python -m evals.solve_rate.cli run "$(EVAL_CONFIG)" --out "$(EVAL_OUT)" $(if $(QUICK),--fresh) || [ $$? -eq 1 ]
	@$(BIN)/python -m evals.solve_rate.cli report "$(EVAL_OUT)" --html "$(EVAL_OUT)/report.html"

model: env ## generate the test model into the cache folder, if absent
	@$(BIN)/python -m evals.models.random_mla

serve: env ## start the patched server on the test model: make serve [MODEL=DIR] [PORT=30000]
	@$(BIN)/python -m evals.serving --port $(PORT) $(if $(MODEL),--model "$(MODEL)")

demo: env ## replay 50 or more agent turns with and without splices: make demo [TRAJECTORY=FILE] [N=8]
	@$(BIN)/python -m evals.replay.demo --out build/demo $(if $(TRAJECTORY),--trajectory "$(TRAJECTORY)") $(if $(N),--turns $(N))

record: env ## record the demo's trajectory again, with real tools
	@$(BIN)/python -m evals.replay.record

# In one run, since every worker imports SGLang and more before its first test. Three workers on two cores: a test waits
# for its server about a third of its time. In the order of tests/conftest.py, not of the number of tests in a file.
test: static ## what check does, and the tests against a live server (minutes)
	@if [ -n "$(GYM_PYTHON)" ]; then $(MAKE) --no-print-directory debug-gym; fi
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not gpu"

check: static ## format, lint, types, imports, tests without a server (a minute and a half on two cores)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not sglang and not slow and not gpu"

static: env ## format, lint, types, imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

fuzz: env ## random operations on SGLang's radix cache, against a model: make fuzz STEPS=100000 [SEED=1]
	@$(BIN)/python -m tests.in_process.fuzz --steps $(or $(STEPS),100000) $(if $(SEED),--seed $(SEED))

bench: env ## measure what the README quotes; prints JSON lines
	@$(BIN)/python -m evals.micro.diff --json
	@$(BIN)/python -m evals.micro.stream_gap
	@$(BIN)/python -m evals.micro.splice --json
	@$(BIN)/python -m evals.micro.policy --json
	@$(BIN)/python -m evals.micro.plan --json

fmt: env ## format, and fix what the linter can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## remove .venv, build output and caches of tools (not the model: see LEYLINE_CACHE)
	rm -rf $(VENV) $(GYM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
