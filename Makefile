# The two commands that matter: `make serve` and `make test`. Both install what they need first, into .venv.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

# The stamp's name changes when the lock, the package's metadata or the place of the checkout does; setup then runs again.
FINGERPRINT := $(shell (cat requirements/cpu.txt requirements/torch-cpu.txt pyproject.toml scripts/setup.sh; pwd) | sha256sum | cut -c1-16)
STAMP := .venv/.setup-$(FINGERPRINT)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-unit lint bench-peers bench bench-quick clean distclean lock

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install the locked CPU stack (PYTHON=python3.11 names an interpreter)

$(STAMP):
	@scripts/setup.sh $(PYTHON) $@

serve: $(STAMP) ## serve the demo model on 127.0.0.1:8000 (ARGS="--model DIR --port 9000": see userkv serve --help)
	@$(BIN)/userkv serve $(ARGS)

test: $(STAMP) ## run all tests; those marked e2e start real vLLM engines (ARGS go to pytest)
	@$(BIN)/python -m pytest $(ARGS)

test-unit: $(STAMP) ## run the tests that need no engine
	@$(BIN)/python -m pytest -m "not e2e" $(ARGS)

lint: $(STAMP) ## check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench-peers: $(STAMP) ## install the benchmark suite's peers into .venv-peers (LMCache)
	@scripts/bench_peers.sh $(PYTHON)

bench: bench-peers ## compare all systems on this machine, hours; writes benchmarks/results/latest.json (ARGS="--resume")
	@$(BIN)/python -m benchmarks.suite --json benchmarks/results/latest.json --plots $(ARGS)

bench-quick: $(STAMP) ## the same in short: each goal once; writes benchmarks/results/quick.json
	@$(BIN)/python -m benchmarks.suite --quick --json benchmarks/results/quick.json $(ARGS)

clean: ## remove caches and build results
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv and .venv-peers, too
	@rm -rf .venv .venv-peers

lock: ## resolve pyproject.toml into requirements/*.txt (UPGRADE=1 takes the newest of everything)
	@scripts/lock.sh $(PYTHON) $(if $(UPGRADE),--upgrade)
