# `make` lists what there is. Everything runs in .venv, which `make venv` builds from requirements/dev.lock.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
ONLY ?=
VERSION ?= 3.12
PYTEST_ARGS ?=
# Evaluated only by the recipes that start Spark; java.sh prints one sentence and fails when there is no Java.
WITH_JAVA = JAVA_HOME="$$(scripts/java.sh)"; export JAVA_HOME;
# Three processes for two cores, as many tests wait for others; each collects all tests, which a fourth one does not
# win back. tests/plugins/balanced.py says which has what. JOBS=0 runs everything in one.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest -p tests.plugins.no_missing_servers -p tests.plugins.short_log -p tests.plugins.balanced -n $(JOBS)

.PHONY: help venv demo quickstart test test-matrix test-slow test-all soak fuzz test-spark-oldest test-python release lint types services bench docs lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: .venv/.stamp ## create .venv from the lock (instant when nothing changed)
	@:

.venv/.stamp: pyproject.toml requirements/dev.lock scripts/venv.sh
	@scripts/venv.sh .venv requirements/dev.lock
	@touch $@

.venv-spark42/.stamp: pyproject.toml requirements/spark42.lock scripts/venv.sh
	@scripts/venv.sh .venv-spark42 requirements/spark42.lock
	@touch $@

.venv-tools/.stamp: requirements/release.lock scripts/venv.sh
	@scripts/venv.sh .venv-tools requirements/release.lock tools
	@touch $@

.venv-$(VERSION)/.stamp: pyproject.toml requirements/dev.lock scripts/venv.sh
	@PYTHON="$$(scripts/python.sh $(VERSION))" scripts/venv.sh .venv-$(VERSION) requirements/dev.lock
	@touch $@

demo: venv ## kill a pipeline at its worst moments and see that nothing is lost (about two minutes; two and a half the first time)
	@$(WITH_JAVA) $(BIN)/strandline demo

quickstart: venv ## the smallest round trip: append, follow, read back
	@$(BIN)/strandline quickstart

test: venv ## every guarantee, on one backend of each kind (about 6 minutes on two quiet cores)
	@$(WITH_JAVA) $(PYTEST) -m "not slow and not matrix" $(PYTEST_ARGS)

test-matrix: venv ## the same on all other backends, seeds and crash points (about 20 minutes)
	@$(WITH_JAVA) $(PYTEST) -m "matrix and not slow" $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: there are none

test-slow: venv ## long schedules of crashes, faults and races (about an hour)
	@echo "The slow suite takes about an hour on two cores."
	@$(WITH_JAVA) $(PYTEST) -m slow $(PYTEST_ARGS) || [ $$? -eq 5 ]  # 5: there are none

test-all: venv ## all three, one after the other
	@$(MAKE) test
	@$(MAKE) test-matrix
	@$(MAKE) test-slow

soak: venv ## simulate whole clusters until one breaks, you stop it, or SECONDS_=600 are over
	@$(BIN)/python -m tests.cluster $(if $(SECONDS_),--seconds $(SECONDS_))

fuzz: venv ## hostile input for all decoders, stores, calls and commands: SECONDS_=600, SEED=1, ONLY=target or group
	@$(BIN)/python -m tests.fuzz $(if $(SECONDS_),--seconds $(SECONDS_)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

test-spark-oldest: .venv-spark42/.stamp ## the Spark tests on the oldest supported Spark, 4.2.0 (an hour; the default suite 10 minutes)
	@echo "All Spark tests on 4.2.0 take about an hour, plus two minutes for their environment the first time."
	@echo "Its default suite takes 10 minutes: PYTEST_ARGS=\"-m 'not slow and not matrix'\""
	@$(WITH_JAVA) .venv-spark42/bin/python -m pytest -p tests.plugins.no_missing_servers tests/spark $(PYTEST_ARGS)

test-python: .venv-$(VERSION)/.stamp ## the default suite on another Python: VERSION=3.14
	@$(WITH_JAVA) .venv-$(VERSION)/bin/python -m pytest -p tests.plugins.no_missing_servers -p tests.plugins.balanced \
	    -n $(JOBS) -m "not slow and not matrix" $(PYTEST_ARGS)

release: .venv-tools/.stamp ## wheel, source archive, SBOM and checksums in dist/, checked; SIGNING_KEY=file signs them
	@scripts/release.sh .venv-tools dist

lint: venv ## ruff, formatting, the house rules and the import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/check_house.py
	@$(BIN)/lint-imports

types: venv .venv-tools/.stamp ## mypy --strict; and the programs of users, with mypy and with pyright
	@$(BIN)/mypy
	@$(BIN)/mypy --config-file= --strict --ignore-missing-imports --no-error-summary tests/types examples/*.py
	@.venv-tools/bin/pyright --pythonpath $(BIN)/python

services: ## install the servers that tests start (about three minutes the first time; Kafka needs `make venv` first)
	@scripts/services.sh

bench: venv ## all benchmarks, or one: make bench ONLY=name
	@$(WITH_JAVA) $(BIN)/python -m benchmarks $(ONLY)

docs: venv ## the pages of docs/ as a site, in build/site/index.html; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: ## resolve the dependencies again and write requirements/*.lock
	@scripts/lock.sh

clean: ## remove environments, caches and build output
	@rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
	    .hypothesis .benchmarks spark-warehouse metastore_db derby.log
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
