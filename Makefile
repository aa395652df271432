# `make demo` and `make test` set up everything they need; Python 3.11 and make are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export TF_CPP_MIN_LOG_LEVEL ?= 3

ON_JAX := $(addprefix tests/contract/fit/test_,equality.py last_window.py metrics.py optimizer.py saving.py \
	structures.py what_differs.py buffers.py statistics.py)

.PHONY: demo test test-torch test-jax test-all matrix upstream check figures notebooks bench bench-smoke docs fuzz format clean

demo: .venv/installed ## the main job in a minute: a small device, a large batch, the proof
	@$(BIN)/python -m bigbatch.cli demo --output demo

# What is promised on torch, in processes of its own; conftest.py says what cannot run there.
ON_TORCH := tests/torch_contract tests/contract/fit

test: .venv/installed ## run the tests
	@echo "== Tests"
	@$(BIN)/python -m pytest -n 2 -m "not matrix"
	@$(MAKE) --no-print-directory test-torch test-jax

test-torch: .venv/installed ## run the contract tests of fit on torch, in processes of their own
	@echo "== Tests on torch"
	@KERAS_BACKEND=torch $(BIN)/python -m pytest -n 2 -m "not matrix" $(ON_TORCH)

# What it compiles is small: XLA need not think about it for long.
test-jax: .venv/installed ## run the contract tests of fit on JAX, in processes of their own
	@echo "== Tests on JAX"
	@KERAS_BACKEND=jax XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" \
		$(BIN)/python -m pytest -n 2 -m "not matrix" tests/jax_contract $(ON_JAX)
	@KERAS_BACKEND=jax JAX_ENABLE_X64=1 XLA_FLAGS="--xla_backend_optimization_level=0" \
		$(BIN)/python -m pytest -n 2 -m "not matrix" tests/contract/fit/test_equality.py -k float64

test-all: .venv/installed ## run the tests, and the matrix of more cases
	@echo "== All tests"
	@$(BIN)/python -m pytest -n 2
	@KERAS_BACKEND=torch $(BIN)/python -m pytest -n 2 $(ON_TORCH)

ROWS ?=
matrix: .venv/installed ## the contract tests on every supported TensorFlow; ROWS="tf2.10 tf2.15" for some
	@echo "== Matrix"
	@$(BIN)/python tests/matrix.py $(ROWS)

SUITES ?=
upstream: build/upstream/installed ## tests and programs of others, accumulated; SUITES="trainers programs" for some
	@echo "== Upstream"
	@cd tests && ../build/upstream/bin/python -m upstream $(SUITES)

check: .venv/installed ## what CI runs: format, lint, types, tests
	@echo "== Format"
	@$(BIN)/ruff format --check .
	@echo "== Lint"
	@$(BIN)/ruff check .
	@echo "== Types"
	@$(BIN)/pyright
	@$(MAKE) --no-print-directory test

figures: .venv/installed ## draw the pictures of the README and the documentation again
	@$(BIN)/python -m bigbatch.cli demo --output docs
	@$(BIN)/python docs/pictures.py

notebooks: .venv/installed ## execute the notebooks and store their outputs
	@$(BIN)/python examples/notebooks/store_outputs.py

MINUTES ?= 10
fuzz: .venv/installed ## random models and settings against the full batch, for MINUTES=10
	@$(BIN)/python tests/fuzz.py --minutes $(MINUTES)

bench: .venv/installed ## measure everything, against the limit and against peers (about an hour)
	@$(BIN)/python -m benchmarks

bench-smoke: .venv/installed ## try the benchmarks out on little; what it measures means nothing
	@$(BIN)/python -m benchmarks --smoke

docs: .venv/installed ## build the documentation into build/site
	@echo "== Documentation"
	@$(BIN)/mkdocs build --strict --site-dir build/site

format: .venv/installed ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## remove the virtual environment and what tools leave behind
	rm -rf .venv build demo dist .pytest_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	@echo "== Setting up .venv with the tested versions (a few minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@# By itself: it asks for a second TensorFlow next to tensorflow-cpu.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps tf_keras
	@touch $@

UPSTREAM := build/upstream/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
build/upstream/installed: pyproject.toml constraints.txt tests/upstream/requirements.txt tests/upstream/requirements-no-deps.txt
	@echo "== Setting up build/upstream with the libraries of other people (a few minutes)"
	@$(PYTHON) -m venv --clear build/upstream
	@$(UPSTREAM) -r tests/upstream/requirements.txt -e .
	@$(UPSTREAM) --no-deps -r tests/upstream/requirements-no-deps.txt
	@touch $@
