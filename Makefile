# The one door: a newcomer, a developer and the continuous integration use the same targets.
# `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
# What each environment has is in requirements/: environments.toml says what is wanted, a lock for
# each what is installed. LATEST=yes: the newest instead, in folders of their own.
L := $(if $(LATEST),-latest)
VENV := .venv$(L)
BIN := $(VENV)/bin
SETUP := $(PYTHON) scripts/setup.py $(if $(LATEST),--latest)
BUILD := build/editable
# One seed for every run of everybody, so that a run can be repeated; test-random draws others.
export KVW_SEED ?= 20261125
# A target's own tests are its testpaths, which pytest runs unless ARGS names others.
# A start of an engine is part of a test's time; what takes long is said.
ENGINE_PYTEST := bin/python -m pytest -o faulthandler_timeout=900 --durations=15 --durations-min=5
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# Tests of other kinds of machines and hours have targets of their own.
ELSEWHERE := engines gpu site stores
PYTEST := $(BIN)/python -m pytest
# Tests wait for daemons for about half of their time: two processes for each of few cores. A file stays
# in one of them, for what its tests share; files in their order, which has long ones early. One process
# again: ARGS="-n 0"; --pdb does that too.
PROCESSES := $(shell echo $$(( $(JOBS) < 4 ? 2 * $(JOBS) : 8 )))
BESIDE := -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
# Else each of the hundreds of daemons that tests start compiles its sources again.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' \
	  | while IFS='|' read -r name what; do printf '  make %-17s %s\n' "$$name" "$$what"; done

.PHONY: setup
setup:  ## .venv with everything to run and test; quick when nothing changed
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "setup: kvwarehouse needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@scripts/system_packages.sh
	@$(PYTHON) scripts/setup.py test
	@$(if $(LATEST),$(SETUP) test)

# The environments of engines and tools, each with a lock and a folder of its own: setup-vllm makes
# .venv-vllm, and so on.
.PHONY: setup-lint setup-docs setup-lowest setup-transformers setup-vllm setup-lmcache setup-dynamo
setup-lint setup-docs setup-lowest setup-transformers setup-vllm setup-lmcache setup-dynamo: setup-%: setup
	@$(SETUP) $*

# SGLang compiles its page hash.
.PHONY: setup-sglang
setup-sglang: setup
	@EXTRA=sglang scripts/system_packages.sh
	@$(SETUP) sglang

.PHONY: lock
lock:  ## pin every version of every environment anew (ARGS=--upgrade: to the newest allowed)
	@$(PYTHON) scripts/lock.py $(ARGS)

.PHONY: demo
demo: setup-transformers  ## a real model over real text: what reuse saves (ARGS="--json")
	@.venv-transformers$(L)/bin/kvwarehouse demo $(ARGS)

.PHONY: test
test: test-native test-python test-docs  ## every test that needs no engine and no GPU

.PHONY: native-tests
native-tests: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(BUILD) --target native_tests -j $(JOBS)

.PHONY: test-native
test-native: native-tests
	@$(BIN)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j 2

.PHONY: test-python
test-python: setup
	@$(PYTEST) -o testpaths=tests $(ELSEWHERE:%=--ignore=tests/%) $(BESIDE) $(ARGS)

.PHONY: test-docs
test-docs: docs
	@$(PYTEST) -o testpaths=tests/site $(ARGS)

.PHONY: test-unit
test-unit: setup  ## the tests of single parts, in a minute and a half; they start no daemon
	@$(PYTEST) -o testpaths=tests/unit $(BESIDE) $(ARGS)

ENGINES := transformers lowest dynamo trtllm sglang lmcache vllm

.PHONY: test-engines
test-engines: CHOSEN := -m "not slow_engine"
test-engines: $(ENGINES:%=test-%)  ## the tests that need torch or an engine, without the slow ones

.PHONY: test-engines-full
test-engines-full: $(ENGINES:%=test-%)  ## every test that needs torch or an engine

# What is to come: by hand, and before a release.
.PHONY: test-latest
test-latest: setup  ## the engines' tests on the newest packages that our ranges allow
	@$(BIN)/python scripts/verify.py --latest $(ARGS)

MINUTES ?= 10
.PHONY: test-random
test-random: setup  ## what draws numbers, with a new seed each time, for MINUTES (10)
	@scripts/random_runs.sh $(MINUTES)

RUNS ?= 10
TARGET ?= test
.PHONY: test-busy
test-busy: setup  ## make test (TARGET=test-engines) RUNS times (10) while stress-ng keeps all cores busy
	@scripts/busy_runs.sh $(RUNS) $(TARGET)

# ARGS="faults asan": these lanes.
.PHONY: test-full
test-full: setup  ## every lane whole, two hours and more; writes docs/verified.md
	@$(BIN)/python scripts/verify.py $(ARGS)

.PHONY: ci
ci:  ## what continuous integration runs, in a fresh clone of HEAD; leaves build/ci.passed
	@scripts/ci.sh

.PHONY: test-transformers
test-transformers: setup-transformers
	@.venv-transformers$(L)/$(ENGINE_PYTEST) -o testpaths=tests/engines/transformers $(CHOSEN) $(ARGS)

# What users may have at the lower ends of the ranges in pyproject.toml.
.PHONY: test-lowest
test-lowest: setup-lowest  ## clients, gRPC's bounds, events, the transformers connector on the lowest versions allowed
	@.venv-lowest$(L)/$(ENGINE_PYTEST) -o testpaths="tests/contract/test_*.py tests/unit/test_event_*.py tests/unit/test_metrics.py tests/integration/test_readme.py tests/integration/test_service_bounds.py tests/engines/transformers" $(CHOSEN) $(ARGS)

# It listens on all addresses, so it gets a network of its own.
.PHONY: test-dynamo
test-dynamo: setup-dynamo
	@KVW_TEST_DYNAMO_PYTHON=".venv-dynamo$(L)/bin/python" scripts/own_network.sh $(PYTEST) -o testpaths=tests/engines/dynamo $(CHOSEN) $(ARGS)

# TensorRT-LLM itself is tested where this Python has it; else those tests say that they are skipped.
TRTLLM_PYTHON ?= .venv-transformers$(L)/bin/python
.PHONY: test-trtllm
test-trtllm: setup-transformers
	@$(TRTLLM_PYTHON) -m pytest -o testpaths=tests/engines/trtllm $(ARGS)

.PHONY: test-vllm
test-vllm: setup-vllm
	@.venv-vllm$(L)/$(ENGINE_PYTEST) -o testpaths=tests/engines/vllm --ignore=tests/engines/vllm/kinds $(CHOSEN) $(ARGS)
	@# By themselves: their models' pages must not be taken for those of the others.
	@.venv-vllm$(L)/$(ENGINE_PYTEST) -o testpaths=tests/engines/vllm/kinds $(CHOSEN) $(ARGS)

.PHONY: test-sglang
test-sglang: setup-sglang
	@.venv-sglang$(L)/$(ENGINE_PYTEST) -W ignore::DeprecationWarning -o testpaths=tests/engines/sglang $(CHOSEN) $(ARGS)

.PHONY: test-lmcache
test-lmcache: setup-lmcache
	@.venv-lmcache$(L)/$(ENGINE_PYTEST) -W ignore::DeprecationWarning -o testpaths=tests/engines/lmcache $(CHOSEN) $(ARGS)

.PHONY: test-stores
test-stores: setup  ## the remote tier over real object stores: a Ceph cluster, started here
	@EXTRA=ceph scripts/system_packages.sh
	@$(PYTEST) -o testpaths=tests/stores $(ARGS)

# On a machine with a GPU, over its own torch and CuPy. Without a registry: WHEELS=FOLDER, which
# `make gpu-wheels` has filled elsewhere.
GPU_VENV := .venv-gpu
WHEELS ?= build/gpu-wheels
.PHONY: gpu-wheels
gpu-wheels:  ## collect what a GPU machine without a registry needs, to take there (WHEELS=FOLDER)
	@PYTHON="$(PYTHON)" scripts/gpu_wheels.sh "$(WHEELS)"

.PHONY: gpu-kit
gpu-kit:  ## one file for a GPU machine without a network: HEAD, wheels, and what to run there
	@PYTHON="$(PYTHON)" scripts/gpu_kit.sh

.PHONY: setup-gpu
setup-gpu:
	@PYTHON="$(PYTHON)" VENV="$(GPU_VENV)" WHEELS="$(WHEELS)" scripts/gpu_setup.sh

.PHONY: test-gpu
test-gpu: setup-gpu  ## the tests that need a GPU; each says why it is skipped without one
	@$(GPU_VENV)/bin/python -m pytest -o testpaths=tests/gpu $(ARGS)

.PHONY: bench-gpu
bench-gpu: setup-gpu  ## a GPU's figures beside its limits; writes docs/gpu.md (ARGS=--quick: to see that it works)
	@mkdir -p build/bench
	@$(GPU_VENV)/bin/python bench/gpu.py --write $(ARGS)

LINT := .venv-lint$(L)/bin

.PHONY: lint
lint: setup-lint  ## style, types, layers, generated code, locks, native checks
	@BIN="$(CURDIR)/$(LINT)" BUILD="$(BUILD)" JOBS="$(JOBS)" scripts/lint.sh

.PHONY: fmt
fmt: setup-lint  ## rewrite the sources in the project's style
	@$(LINT)/ruff check --fix --exit-zero --quiet .
	@$(LINT)/ruff format --quiet .
	@find native \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(LINT)/clang-format -i

.PHONY: proto
proto: setup-lint  ## regenerate the wire code after a change of proto/
	@$(LINT)/python scripts/generate_proto.py

.PHONY: dashboards
dashboards: setup-lint  ## write deploy/grafana anew after a change of scripts/dashboard_*.py
	@$(LINT)/python scripts/dashboards.py

# ARGS="load growth": those again; ARGS=--write: docs/benchmarks.md too.
.PHONY: bench
bench: setup  ## this machine's figures beside its limits: tables, a page, pictures; bench-vllm: with an engine
	@$(BIN)/python bench/warehouse.py $(ARGS)

# Each script of it has --help.
BENCHES ?= ttft overhead sweep handoff
.PHONY: bench-vllm
bench-vllm: setup-vllm  ## with vLLM, an hour and more (ARGS=--quick: minutes; BENCHES=ttft: one of them)
	@mkdir -p build/bench
	@for name in $(BENCHES); do out=build/bench/vllm_$$name; \
	  .venv-vllm/bin/python bench/vllm_$$name.py --json $$out.json --html $$out.html --png $$out.png $(ARGS); \
	done

.PHONY: setup-peers
setup-peers: setup  ## what bench-peers compares the warehouse with, as far as it can be had
	@PYTHON="$(PYTHON)" scripts/setup_peers.sh

.PHONY: bench-peers
bench-peers: setup-peers  ## the same work beside Redis, LMDB, files, Mooncake, LMCache, vLLM's files (ARGS=--quick)
	@mkdir -p build/bench
	@out=build/bench/peers; $(BIN)/python bench/peers.py --json $$out.json --html $$out.html --png $$out.png $(ARGS)

FUZZ := .venv-fuzz/bin
# With its counts it writes docs/guarantees.md; ARGS=--help says more.
.PHONY: faults
faults: setup-fuzz native-tests  ## break it on purpose, 100,000 times: half an hour (ARGS="--seed N")
	@PYTHONPATH=tests/support $(FUZZ)/python -m testkit.fault_run --build $(BUILD) --write docs/guarantees.md $(ARGS)

.PHONY: asan tsan
asan: setup  ## native and concurrency tests under AddressSanitizer and UBSan
	@VENV="$(VENV)" JOBS="$(JOBS)" scripts/sanitize.sh address
tsan: setup  ## native tests under ThreadSanitizer
	@VENV="$(VENV)" JOBS="$(JOBS)" scripts/sanitize.sh thread

.PHONY: setup-fuzz
setup-fuzz: setup
	@EXTRA=fuzz scripts/system_packages.sh
	@$(SETUP) fuzz

FUZZ_S ?= 30
.PHONY: fuzz
fuzz: setup-fuzz  ## every fuzz target for FUZZ_S seconds, under sanitizers (ARGS=NAME: one of them)
	@VENV=.venv-fuzz JOBS="$(JOBS)" FUZZ_S="$(FUZZ_S)" scripts/fuzz.sh $(ARGS)

.PHONY: soak
soak: setup  ## churn for KVW_SOAK_MINUTES (20): nothing grows, nothing is wrong (ARGS="--minutes 5 --json")
	@$(BIN)/python -P -m kvwarehouse_bench.strain.soak $(ARGS)

.PHONY: docs
docs: setup-docs  ## the documents as a site, build/site, with reference pages made of the code
	@$(BIN)/python scripts/check_docs.py
	@PYTHONPATH=scripts .venv-docs$(L)/bin/python -m doc_site.build

.PHONY: docs-serve
docs-serve: docs  ## the site at http://127.0.0.1:8000, until Ctrl-C
	@$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory build/site

.PHONY: clean clean-cache
clean:  ## remove everything that make has made in this clone
	@rm -rf build dist .venv .venv-* .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	@find bench kvwarehouse connectors tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
clean-cache:  ## remove what clones share: environments, and which sources are clean
	@rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/kvwarehouse"
