# Shoal's commands. Each makes what it needs first, and does nothing twice: stamp files in .venv say what is done.
#
#   .venv/.created    a whole virtual environment (scripts/make-venv)
#   .venv/.built      Shoal itself, installed editable: Python files are read from src/, only C++ is ever rebuilt
#   .venv/.tools      the development tools
#
# Variables: PYTHON, the interpreter to make .venv from; ARGS, more arguments for pytest, "shoal serve" or "shoal run".

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard csrc/* csrc/*/*)
CPP := $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve run test test-slow check fix docs peers build asan clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

serve: $(VENV)/.built ## install Shoal into .venv and serve OpenAI's API on port 8000; ARGS="--port 9000" and so on
	@$(BIN)/shoal serve $(ARGS)

run: $(VENV)/.built ## install Shoal into .venv and answer examples/prompts.jsonl
	@$(BIN)/shoal run examples/prompts.jsonl $(ARGS)

test: $(VENV)/.tools ## the test suite; ARGS="-k word" to choose
	@$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.tools ## the tests marked slow
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.tools ## linters, formatters, types and import contracts; changes nothing
	@failed=; \
	step() { echo "+ $$*"; "$$@" || failed="$$failed\n  $${1##*/} $$2"; }; \
	step $(BIN)/ruff check .; \
	step $(BIN)/ruff format --check .; \
	step $(BIN)/mypy; \
	step $(BIN)/lint-imports --no-logo; \
	[ -z "$(CPP)" ] || step $(BIN)/clang-format --dry-run -Werror $(CPP); \
	[ -z "$$failed" ] || { printf '%b\n' "failed:$$failed"; exit 1; }

fix: $(VENV)/.tools ## apply what the linters and formatters can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

docs: $(VENV)/.tools ## write docs/cli.md from the commands' own help, and the dashboard in deploy/
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/python scripts/grafana_dashboard.py

peers: $(VENV)/.tools ## compare with other engines, installed in build/peers (slow, gigabytes)
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

build: $(VENV)/.tools ## wheel and sdist in dist/, the wheel built from the sdist in a clean environment
	$(BIN)/python -m build

# The sanitized module is tested from a copy of the package, with -S so that .venv's editable install stays out of the
# way. The C++ library is preloaded too: the sanitizer looks for the functions that throw when the process starts.
SANITIZED := build/asan/site
asan: $(VENV)/.tools ## the kernel tests under the address and undefined-behaviour sanitizers
	$(BIN)/cmake -S . -B build/asan -G Ninja -DSHOAL_SANITIZE=ON -DSHOAL_WERROR=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build build/asan
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -R src/shoal $(SANITIZED)/
	$(BIN)/cmake --install build/asan --prefix $(SANITIZED)
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		PYTHONPATH="$(abspath $(SANITIZED)):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
		$(BIN)/python -S -m pytest tests/kernels $(ARGS)

clean: ## remove .venv, build outputs and caches; downloaded models stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The script leaves the stamp alone when the environment is whole, so looking every time costs nothing downstream.
$(VENV)/.created: FORCE
	@scripts/make-venv $(PYTHON) $(VENV)

# Build requirements go into .venv, without build isolation: the compiler then sees the same paths every time, and the
# persistent folder build/ recompiles only what changed. cmake and ninja are among them, so none need be installed.
$(VENV)/.built: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "Building and installing Shoal into $(VENV)"
	@$(PIP) --group build
	@$(PIP) --no-build-isolation --config-settings=cmake.define.SHOAL_WERROR=ON --editable .
	@touch $@

$(VENV)/.tools: $(VENV)/.built pyproject.toml
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) --group dev
	@touch $@
