# `make demo` and `make test` are all that a fresh machine needs; both make the environment first.
#
#   make setup PYTHON=python3.12    the interpreter to make the environment of
#   make setup HOST_PACKAGES=1      download nothing: use the torch, setuptools, pytest, ... that PYTHON
#                                   already has, and only build this package (a GPU machine without
#                                   network, or a torch of your own)
#   make setup PIP_FLAGS=...        more flags for every pip install, such as the index of PyTorch's
#                                   CPU wheels: on Linux the default one carries gigabytes of CUDA
#
# `make clean` and set up again to change any of these.

PYTHON ?= python3
PIP_FLAGS ?=
HOST_PACKAGES ?=
NVCC ?= nvcc

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BUILT_FROM := constraints.txt pyproject.toml setup.py $(shell find csrc -type f)
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CUDA_FILES := $(wildcard csrc/cuda/*.cu)

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all conformance asan memcheck racecheck synccheck lint bench cuda-check clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z -]+:.*  ## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv, install the pinned torch, build the package

ifeq ($(HOST_PACKAGES),)
$(STAMP): $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt torch setuptools wheel ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP_INSTALL) -c constraints.txt --no-build-isolation \
		-e ".[demo,test,lint,models]"
	touch $@
else
# PYTHON may itself be in a virtual environment, whose packages --system-site-packages would not find:
# a .pth file names them instead.
$(STAMP): $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
		> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
	PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" \
		$(PIP_INSTALL) --no-index --no-deps --no-build-isolation -e .
	touch $@
endif

demo: $(STAMP)  ## train real models with stock torch.compile and with this package, and compare
	$(BIN)/python -m compile_losses demo

test: $(STAMP)  ## the tests, less those marked slow; the last line says how many ran
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(STAMP)  ## all the tests
	$(BIN)/python -m pytest -n 2

conformance: $(STAMP)  ## compare with torch in full, and write docs/conformance.md
	$(BIN)/python -m tests.conformance -n 2

# A copy of the package with instrumented kernels. The console script, unlike `python -m`, does not
# put the source tree first on the path; -p imports the copy before the tests import the package.
ASAN_DIR := build/asan
ASAN_TESTS ?= tests/conformance/test_hostile.py tests/test_errors.py
asan: $(STAMP)  ## the op tests on CPU kernels built with AddressSanitizer
	SANITIZE=address $(BIN)/python setup.py --quiet build --build-lib $(ASAN_DIR) \
		--build-temp $(ASAN_DIR)/objects
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(ASAN_DIR) \
		$(BIN)/pytest -p compile_losses -p no:cacheprovider $(ASAN_TESTS)

SANITIZE_FLAGS ?=
memcheck racecheck synccheck: $(STAMP)  ## what of the GPU tests has not been under that tool yet
	$(BIN)/python -m tests.sanitize $@ $(SANITIZE_FLAGS)

lint: $(STAMP)  ## ruff, mypy and clang-format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

bench: $(STAMP)  ## the benchmarks
	$(BIN)/python -m benchmarks

cuda-check:  ## compile every CUDA source, if there is an nvcc; needs neither torch nor a GPU
	@if command -v $(NVCC) > /dev/null; then \
		for file in $(CUDA_FILES); do \
			echo "$(NVCC) $$file"; \
			$(NVCC) -std=c++20 -O3 -arch=sm_90 -c -o /dev/null $$file || exit 1; \
		done; \
	else echo "cuda-check: skipped, there is no $(NVCC) on the PATH"; fi

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build *.egg-info compile_losses/*.so demo_results.png \
		.pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
