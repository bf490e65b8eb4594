# Every target makes or refreshes the environment first; a second run starts in seconds.
#   PYTHON=python3.12  the interpreter to use (default: the newest >= 3.11 on the PATH)
#   VENV=.venv         where the environment stands

VENV ?= .venv
MODEL ?= smollm2-135m
BIN := $(VENV)/bin
export VENV
ifdef PYTHON
export PYTHON
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check serve notebooks lock clean ready

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: ready  ## measure TTFT cold, resident and restored on a real model; ends with a table and a report
	$(BIN)/zllm pull smollm2-135m
	$(BIN)/zllm experiment run experiments/ttft_restore.yaml --quick

test: ready  ## what CI runs: check, then every test that takes seconds
	@scripts/test -m "not slow"

test-all: ready  ## check, then every test
	@scripts/test

check: ready  ## lint, format, types, walls
	@scripts/check

serve: ready  ## serve MODEL over HTTP on 127.0.0.1:8000
	$(BIN)/zllm pull $(MODEL)
	$(BIN)/zllm serve --model $(MODEL)

notebooks: ready  ## execute the notebooks and keep their outputs
	$(BIN)/python scripts/notebooks

lock:  ## resolve the requirements anew and lock them with hashes (needs uv)
	scripts/lock --upgrade

clean:  ## remove the environment and what tools left behind; models and snapshots stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

ready:
	@scripts/bootstrap
