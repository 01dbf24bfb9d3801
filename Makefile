# make demo   train a small language model on 2 ranks, in an environment of its own
# make test   lint, types and all tests
# make test-torch TORCH=2.15.0   the tests of the process groups on that version of torch, in an environment of its own
# make sanitize   fuzz the C core and load it with random operations, under sanitizers: ten minutes; needs gcc and clang
# make gpu    check every CUDA path on one NVIDIA GPU, without a network (docs/guides/gpu.md); WHEELS=folder installs missing packages
# make clean  remove the environments and what was built
#
# PYTHON=python3.12 chooses the interpreter (3.11 or later), TESTS=tests/parallel the tests of test-torch.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TESTS  ?= tests/comm
OTHER  := .venv-torch-$(TORCH)
NATIVE := $(wildcard farandole/native/*.c farandole/native/*.h farandole/native/*.inc)

# The checks use the environment of `make test` where there is one and PYTHON is not given.
GPU_PYTHON := $(if $(and $(wildcard $(BIN)/python),$(filter file,$(origin PYTHON))),$(BIN)/python,$(PYTHON))
GPU_JSON   ?= docs/gpu.json

# An installation is redone when what it depends on changed; otherwise it takes no time.
# pip is quiet (errors only, those in full): each phase says in a line what it does.  Modules are compiled when they
# are first imported, as most never are.
INSTALLED := pyproject.toml setup.py constraints.txt $(NATIVE)
INSTALL   := $(BIN)/pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt --editable

# Images of containers often set it. Without bytecode each process spends 2 to 3 s on compiling torch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types tests test-torch gpu sanitize clean

demo: $(VENV)/core.stamp
	$(BIN)/farandole train
	@echo
	@echo "The command is $(BIN)/farandole; after '. $(BIN)/activate' it is farandole. To let the model write:"
	@echo "    $(BIN)/farandole generate runs --prompt 'def'"

test: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory --jobs 2 types tests

types:
	$(BIN)/mypy farandole

# Three tests at a time: most of them wait, for processes to start or for deadlines.
tests:
	$(BIN)/pytest --numprocesses 3 --dist worksteal

# All packages but torch, torchvision, and setuptools, which some versions of torch limit, have the versions of `make test`.
test-torch:
	@test -n "$(TORCH)" || { echo "give the version of torch: make test-torch TORCH=2.15.0" >&2; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|torchvision|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install -qq --no-compile --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		torch==$(TORCH) --editable '.[test]'
	$(OTHER)/bin/pytest --numprocesses 3 --dist worksteal $(TESTS)

sanitize: $(VENV)/test.stamp
	$(BIN)/pytest -m slow tests/native

gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --json $(GPU_JSON) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(ONLY),--only $(ONLY))

$(VENV)/core.stamp: $(INSTALLED) | $(BIN)/pip
	@echo "Installing Farandole with torch and ten more packages into $(VENV): a minute or two, most of it the download"
	@$(INSTALL) .
	@touch $@

$(VENV)/test.stamp: $(INSTALLED) | $(BIN)/pip
	@echo "Installing Farandole, torch, ten more packages and the tools of the tests into $(VENV): a minute or two"
	@$(INSTALL) '.[test]'
	@touch $@ $(VENV)/core.stamp

$(BIN)/pip:
	@echo "Making an environment in $(VENV) with $$($(PYTHON) --version): some seconds"
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .venv-torch-* build farandole.egg-info
	rm -f farandole/native/_core.*.so
