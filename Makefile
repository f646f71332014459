# `make demo` and `make test` are all that a fresh machine needs; both make the environment first.
# That of the demo has what the demo needs, and kernels for this processor alone; every other target
# adds the rest to it.
#
#   make demo QUICK=1               two of the demo's models
#
#   make setup PYTHON=python3.12    the interpreter to make the environment of
#   make setup HOST_PACKAGES=1      download nothing: use the torch, setuptools, pytest, ... that PYTHON
#                                   already has, and only build this package (a GPU machine without
#                                   network, or a torch of your own)
#   make setup PIP_FLAGS=...        more flags for every pip install, such as the index of PyTorch's
#                                   CPU wheels: on Linux the default one carries gigabytes of CUDA
#
#   make test LOSS=huber_loss       the tests of one loss
#
#   make test TORCH=2.14.1          another torch than the pinned one, in an environment of its own
#                                   (.venv-2.14.1), with the wheel that `make wheel` built
#
# `make clean` and set up again to change one of those of `make setup`.

# Otherwise each process of the tests might compile the bytecode of thousands of modules.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
PIP_FLAGS ?=
HOST_PACKAGES ?=
NVCC ?= nvcc
TORCH ?=
QUICK ?=
# Of `make wheel`: with CUDA kernels or without, and where the objects lie that it compiles.
CUDA ?= 1
OBJECTS ?= $(CURDIR)/build/kernels

VENV := .venv
BIN := $(VENV)/bin
# What stands in the environment: all, or what the demo needs of it.
STAMP := $(VENV)/.installed
DEMO_STAMP := $(or $(wildcard $(STAMP)),$(VENV)/.installed-for-the-demo)
BUILT_FROM := constraints.txt pyproject.toml setup.py $(shell find csrc build_tools -name '*.py' -o -path 'csrc/*' -type f)
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# What nvcc is called with: each source, and that of elementwise losses with the name of each.
PER_LOSS := csrc/cuda/elementwise.cu
LOSSES := $(basename $(notdir $(wildcard csrc/losses/elementwise/*.h)))
CUDA_UNITS := $(filter-out $(PER_LOSS),$(wildcard csrc/cuda/*.cu)) \
	$(foreach loss,$(LOSSES),'-DFUSED_LOSS=$(loss) $(PER_LOSS)')

ARCHITECTURES := $(shell sed -n 's/^DEFAULT_ARCHITECTURES = "\(.*\)"/\1/p' build_tools/cuda.py)
# Those that Inductor's C++ code, for which there has to be a compiler, adds nothing to.
TESTS_OF_A_WHEEL ?= tests/test_library.py tests/test_errors.py tests/test_without_kernels.py

# Bytecode is compiled where it is imported: of most modules it never is.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick test-all conformance asan memcheck racecheck synccheck lint bench readme \
	docs cuda-check sdist wheel wheel-any check-wheel clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z -]+:.*  ## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv, install the pinned torch, build the package

# Each stamp has its extras, and the instruction sets that are compiled for.
$(STAMP): EXTRAS := demo,docs,test,lint,models,wheel
$(STAMP): INSTRUCTION_SETS := all
$(VENV)/.installed-for-the-demo: EXTRAS := demo
$(VENV)/.installed-for-the-demo: INSTRUCTION_SETS := native

ifeq ($(HOST_PACKAGES),)
$(STAMP) $(VENV)/.installed-for-the-demo: $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt torch setuptools wheel ninja
	$(BIN)/python -m build_tools.extras $(EXTRAS) > $(VENV)/extras.txt
	@# Other packages are installed while the kernels compile.
	$(PIP_INSTALL) -c constraints.txt -r $(VENV)/extras.txt & others=$$!; \
		PATH="$(abspath $(BIN)):$$PATH" COMPILE_LOSSES_CPU=$(INSTRUCTION_SETS) \
		$(PIP_INSTALL) --no-build-isolation --no-deps -e . ; kernels=$$?; \
		wait $$others && exit $$kernels
	touch $@
else
# PYTHON may itself be in a virtual environment, whose packages --system-site-packages would not find:
# a .pth file names them instead.
$(STAMP) $(VENV)/.installed-for-the-demo: $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
		> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
	PATH="$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" \
		COMPILE_LOSSES_CPU=$(INSTRUCTION_SETS) \
		$(PIP_INSTALL) --no-index --no-deps --no-build-isolation -e .
	touch $@
endif

# The compiler has just compiled for this processor's instructions: Inductor need not try it.
demo: export TORCHINDUCTOR_VEC_ISA_OK ?= 1
demo: $(DEMO_STAMP)  ## train real models with stock torch.compile and with this package, and compare
	$(BIN)/python -m compile_losses demo $(if $(QUICK),--quick)

ifeq ($(TORCH),)
test: $(STAMP)  ## the tests, less those marked slow; the last line says how many ran
	$(BIN)/python -m pytest -n 2 -m "not slow" $(if $(LOSS),-k $(LOSS)) $(TESTS)
else
# The libraries are the same for every version of torch: what is tested is the wheel.
OTHER ?= .venv-$(TORCH)
OTHER_PIP := $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
test:
	@test -n "$(WHEEL)" || { echo "first: make wheel, or make wheel CUDA=0"; exit 1; }
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	mkdir -p build && grep -Ev '^(torch|setuptools)==' constraints.txt > build/constraints.txt
	$(OTHER_PIP) -c build/constraints.txt torch==$(TORCH) \
		expecttest hypothesis ninja numpy pytest pytest-xdist setuptools
	$(OTHER_PIP) --no-deps --force-reinstall $(WHEEL)
	$(OTHER)/bin/python -m build_tools.test_wheel --record $(OTHER)/bin/python -n 2 \
		-m "not slow" $(if $(LOSS),-k $(LOSS)) $(TESTS)
endif

quick: $(STAMP)  ## the tests of what changed, in less than a minute: of passes, and of changed modules
	$(BIN)/python -m tests.quick $(TESTS)

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

readme: $(STAMP)  ## the tables of README.md and docs/performance.md, from the results' CSV files
	$(BIN)/python -m benchmarks.pages

docs: $(STAMP)  ## build/site: the pages of docs/ and the API; a warning or a broken link is an error
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --doctree-dir build/doctrees \
		docs build/site
	@echo "build/site/index.html"

# The capabilities that `make cuda-check` compiles for: the newest that has paths of its own, and an
# older one, for the sources that have other paths there. launch.cuh has nothing in their place.
ARCHS ?= 9.0 8.0
HAVE_OTHER_PATHS := $(filter-out %/launch.cuh,$(shell grep -l '__CUDA_ARCH__ >=' csrc/cuda/*))
# A newer nvcc can leave out most optimisations. It still tells of instructions that an architecture
# lacks, and of too much shared memory.
FASTEST = -O0 $(if $(shell $(NVCC) --help 2> /dev/null | grep -F -- --Ofast-compile),-Ofc=max)
gencodes = $(foreach arch,$(subst .,,$(1)),-gencode arch=compute_$(arch),code=sm_$(arch))
cuda-check:  ## compile every CUDA source, if there is an nvcc, for ARCHS="9.0 8.0"; needs no GPU
	@if command -v $(NVCC) > /dev/null; then \
		printf '%s\n' $(CUDA_UNITS) | xargs -P "$$(getconf _NPROCESSORS_ONLN)" -I {} \
			sh -c 'archs="$(call gencodes,$(firstword $(ARCHS)))"; \
				$(NVCC) -std=c++20 -MM {} | grep -qF $(addprefix -e ,$(HAVE_OTHER_PATHS)) \
					&& archs="$(call gencodes,$(ARCHS))"; \
				echo "$(NVCC) $$archs {}"; exec $(NVCC) -std=c++20 $(FASTEST) -c -o /dev/null $$archs {}'; \
	else echo "cuda-check: skipped, there is no $(NVCC) on the PATH"; fi

sdist: $(STAMP)  ## dist/*.tar.gz
	rm -rf dist/*.tar.gz
	$(BIN)/python setup.py --quiet sdist

# From the source distribution, which is thereby known to build; the objects are kept.
UNPACKED := build/sdist
RAW_WHEEL := build/wheel
wheel: sdist  ## dist/*linux*.whl for all GPUs, from the source distribution (CUDA=0: the CPU kernels alone)
	rm -rf $(UNPACKED) $(RAW_WHEEL) dist/*linux*.whl && mkdir -p $(UNPACKED)
	tar -xzf dist/*.tar.gz -C $(UNPACKED) --strip-components=1
	cd $(UNPACKED) && PATH="$(abspath $(BIN)):$$PATH" COMPILE_LOSSES_CUDA=$(CUDA) COMPILE_LOSSES_CPU=all \
		TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$(ARCHITECTURES)}" \
		$(abspath $(BIN))/python setup.py build --build-temp $(OBJECTS) \
		bdist_wheel --dist-dir $(CURDIR)/$(RAW_WHEEL)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --only-plat \
		--plat manylinux_2_28_$(shell uname -m) --exclude 'libtorch*.so' --exclude 'libcudart.so.*' \
		--wheel-dir dist $(RAW_WHEEL)/*.whl

wheel-any: sdist  ## dist/*-py3-none-any.whl for any platform, without kernels: torch's ops compute
	rm -rf $(UNPACKED) dist/*-any.whl && mkdir -p $(UNPACKED)
	tar -xzf dist/*.tar.gz -C $(UNPACKED) --strip-components=1
	cd $(UNPACKED) && COMPILE_LOSSES_CPU=none \
		$(abspath $(BIN))/python setup.py --quiet bdist_wheel --dist-dir $(CURDIR)/dist

# With kernels, if there are two.
WHEEL ?= $(or $(wildcard dist/*linux*.whl),$(wildcard dist/*.whl))
check-wheel:  ## what a wheel must be, and tests of it in a fresh environment, without compilers
	$(BIN)/python -m build_tools.check_wheel $(WHEEL)
	rm -rf build/fresh && $(BIN)/python -m venv build/fresh
	build/fresh/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
		-c constraints.txt torch expecttest hypothesis numpy pytest pytest-xdist
	build/fresh/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(WHEEL)
	$(BIN)/python -m build_tools.test_wheel --without-compilers build/fresh/bin/python -q -n 2 \
		$(TESTS_OF_A_WHEEL)

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info compile_losses/kernels.json compile_losses/*.so \
		demo_results.png .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
