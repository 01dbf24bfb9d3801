# make demo   train a small language model on 2 ranks, in a new virtual environment
# make test   lint, documentation, types and all tests
# make test-tensorflow   run the tests of Horovod's interface for TensorFlow, a part of make test
# make test-torch TORCH=2.15.0   run the tests of process groups with this version of torch, in a separate environment
# make test-without-compiler   run tests without a C compiler, so that ranks communicate through Gloo
# make docs   build the documentation into site/ and check every link; make docs-serve serves it at 127.0.0.1:8000
# make pictures   redraw the documentation's pictures if their data or code has changed
# make matrix run the tests of process groups with each installed Python in PYTHONS and each torch version in TORCHES, with and
#             without a compiler
# make wheels build the source distribution and wheels for x86_64 and aarch64 in dist/, and test them
# make coverage  measure the branch coverage of all tests on all ranks, and fail if it is below 93 % (20 minutes)
# make test-all  run test, coverage, wheels, matrix and all slow tests, including the tests of sanitize (several hours)
# make sanitize   fuzz the C core, and run random operations under sanitizers; needs gcc and clang (10 minutes)
# make random run CASES random programs of each kind, starting with seed SEED, and compare them with one process, Gloo and lone requests
# make gpu    check every CUDA path on one NVIDIA GPU, without a network (docs/guides/gpu.md); WHEELS=folder installs missing packages
# make clean  remove the virtual environments and build outputs
#
# PYTHON=python3.12 selects the interpreter (3.11 or later). TESTS=tests/parallel selects the tests that test-torch runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TESTS  ?= tests/comm
OTHER  := .venv-torch-$(TORCH)-$(notdir $(PYTHON))
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
NATIVE := $(wildcard farandole/native/*.c farandole/native/*.h farandole/native/*.inc)

# `make gpu` uses the environment of `make test` if it exists and PYTHON is not set.
GPU_PYTHON := $(if $(and $(wildcard $(BIN)/python),$(filter file,$(origin PYTHON))),$(BIN)/python,$(PYTHON))
GPU_JSON   ?= docs/gpu.json

# An installation is repeated only if one of these files has changed.
# pip prints only errors, because each target prints its own message.  Most installed modules are never imported, so
# modules are compiled when they are first imported, not by pip.
INSTALLED := pyproject.toml setup.py constraints.txt $(NATIVE)
INSTALL   := $(BIN)/pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable

# Container images often set this variable. Without bytecode files, each process spends 2 to 3 s compiling torch's modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types tests test-tensorflow test-torch test-without-compiler test-all docs docs-serve pictures coverage matrix wheels gpu sanitize random clean

demo: $(VENV)/train.stamp
	$(BIN)/farandole train
	@echo
	@echo "The command is $(BIN)/farandole, or farandole after '. $(BIN)/activate'. To generate text with the model:"
	@echo "    $(BIN)/farandole generate runs --prompt 'def'"

test: $(VENV)/docs.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs 3 docs types tests

types:
	$(BIN)/mypy farandole

# Three tests run at a time, because most tests wait for processes to start or for timeouts.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist worksteal

tests: test-tensorflow $(VENV)/chromium.stamp
	$(PYTEST) $(TENSORFLOW_TESTS:%=--ignore=%)

# Only the TensorFlow tests can import TensorFlow. If it were installed in the environment, tensorboard would import it in
# every training run.
TENSORFLOW_TESTS := tests/horovod/tensorflow tests/bench/test_tensorflow.py

# Only two tests run at a time, because each pytest process imports TensorFlow for its ranks.
test-tensorflow: $(VENV)/tensorflow.stamp
	PYTHONPATH=$(CURDIR)/$(VENV)/tensorflow $(PYTEST) --numprocesses 2 --quiet $(TENSORFLOW_TESTS)

# All packages have the same versions as in `make test`, except torch, torchvision and setuptools.  Some versions of torch
# limit the version of setuptools.
test-torch:
	@test -n "$(TORCH)" || { echo "TORCH is not set: make test-torch TORCH=2.15.0" >&2; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|torchvision|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -qq --no-compile --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		torch==$(TORCH) --editable '.[test]'
	$(OTHER)/bin/pytest --numprocesses 3 --dist worksteal $(TESTS)

# The copy of the committed files contains no compiled core, and PATH is a folder with links to all commands except compilers.
# Therefore the core is not built, and ranks communicate through Gloo.
BARE := build/without-compiler
BARE_TESTS ?= tests/parallel/pipeline/test_runtime.py tests/train/test_trainer.py tests/train/test_resume.py \
	tests/serve/test_engine.py tests/serve/test_sampling.py tests/horovod/test_operations.py tests/horovod/test_optimizer.py \
	tests/cli/test_main.py
test-without-compiler: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/test.stamp)
	@rm -rf $(BARE) && mkdir -p $(BARE)/bin
	git archive HEAD | tar -x -C $(BARE)
	@for folder in $$(printf '%s' "$$PATH" | tr : ' '); do ln -s "$$folder"/* $(BARE)/bin 2> /dev/null; done; \
		cd $(BARE)/bin && rm -f cc c89 c99 tcc *gcc *gcc-[0-9]* *c++* *g++* *clang* *cpp*
	cd $(BARE) && PATH=$(CURDIR)/$(BARE)/bin $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
	test ! -e $(BARE)/farandole/native/_core.so
	cd $(BARE) && PATH=$(CURDIR)/$(BARE)/bin PYTHONPATH=$(CURDIR)/$(BARE) $(CURDIR)/$(PYTEST) $(BARE_TESTS)

matrix:
	@for python in $(PYTHONS); do \
		command -v $$python > /dev/null || { echo "matrix: $$python is not installed"; continue; }; \
		for torch in $(TORCHES); do \
			echo "matrix: $$python, torch $$torch"; \
			$(MAKE) --no-print-directory test-torch PYTHON=$$python TORCH=$$torch || exit 1; \
			$(MAKE) --no-print-directory test-without-compiler BIN=.venv-torch-$$torch-$$python/bin || exit 1; \
		done; \
	done

# zig includes the headers and the C library of each target, so no container is needed. The wheels need glibc 2.28 or later.
wheels: $(VENV)/wheels.stamp
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --sdist
	@for arch in x86_64 aarch64; do \
		rm -rf build; export CC="$(CURDIR)/$(BIN)/python -m ziglang cc -target $$arch-linux-gnu.2.28"; \
		LDSHARED="$$CC -shared -s" CFLAGS=-g0 FARANDOLE_REQUIRE_CORE=1 PIP_CONSTRAINT=constraints.txt \
			$(BIN)/python -m build --wheel -C--build-option=--plat-name=manylinux_2_28_$$arch || exit 1; \
	done
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest -m slow --timeout=900 tests/packaging

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs-serve: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pictures: $(VENV)/test.stamp
	PYTHONPATH=. $(BIN)/python docs/pictures/draw.py

coverage: $(VENV)/test.stamp $(VENV)/tensorflow.stamp
	PYTHONPATH=$(CURDIR)/$(VENV)/tensorflow $(PYTEST) --quiet --cov --cov-report= --cov-fail-under=0 --timeout=900 $(TENSORFLOW_TESTS)
	$(PYTEST) --cov --cov-append --cov-report=term --timeout=900 $(TENSORFLOW_TESTS:%=--ignore=%)

test-all: test coverage wheels matrix
	$(BIN)/pytest -m slow --ignore=tests/packaging --timeout=3600

sanitize: $(VENV)/test.stamp
	$(BIN)/pytest -m slow --timeout=3600 tests/native

# Each run selects other programs. A failure prints its seed: `make random SEED=7 CASES=1` runs the programs of seed 7 again.
SEED  ?= $(shell date +%s)
CASES ?= 100
random: $(VENV)/test.stamp
	FARANDOLE_SEEDS=$(SEED):$(CASES) $(PYTEST) --numprocesses 2 tests/random_programs

gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --json $(GPU_JSON) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY))

$(VENV)/train.stamp: $(INSTALLED) | $(BIN)/pip
	@echo "Installing Farandole, torch and the dependencies for training into $(VENV): one or two minutes, mostly for downloads"
	@$(INSTALL) '.[train]'
	@touch $@

$(VENV)/test.stamp: $(INSTALLED) | $(BIN)/pip
	@echo "Installing Farandole, torch and the dependencies of the tests into $(VENV): one or two minutes"
	@$(INSTALL) '.[test]'
	@touch $@ $(VENV)/train.stamp

$(VENV)/tensorflow.stamp: $(VENV)/test.stamp
	@echo "Installing TensorFlow into $(VENV)/tensorflow"
	@rm -rf $(VENV)/tensorflow
	@$(subst --editable,,$(INSTALL)) --target $(VENV)/tensorflow keras \
		"tensorflow-cpu; platform_machine == 'x86_64'" "tensorflow; platform_machine != 'x86_64'"
	@touch $@

# Browser tests are skipped if no browser is installed. Chromium is not a Python package, and only root can install it.
$(VENV)/chromium.stamp: $(VENV)/test.stamp
	@if { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get > /dev/null; then \
		echo "Installing Chromium for the browser tests"; \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium > /dev/null \
			|| echo "Chromium could not be installed: browser tests are skipped"; \
	else echo "Chromium is not installed: browser tests are skipped"; fi
	@touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp
	@echo "Installing the documentation tools into $(VENV)"
	@$(INSTALL) '.[test,docs]'
	@touch $@

$(VENV)/wheels.stamp: $(VENV)/test.stamp
	@echo "Installing the tools that build and check wheels into $(VENV)"
	@$(INSTALL) '.[test,wheels]'
	@touch $@

$(BIN)/pip:
	@echo "Creating a virtual environment in $(VENV) with $$($(PYTHON) --version): a few seconds"
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .venv-torch-* build dist site farandole.egg-info
	rm -f farandole/native/_core.so
