# Needs Python 3.11 or newer, make and a C compiler; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --constraint constraints.txt
LOG := $(VENV)/setup.log
EXTRAS := dev,hf,redis,data,tensorboard,oracles

# $(call quietly,WHAT,COMMAND), neither with a comma, says what it does in one line, and all that the command said only if it fails.
quietly = @echo '$(1)'; { $(2); } > $(LOG).part 2>&1; status=$$?; cat $(LOG).part >> $(LOG); \
	test $$status = 0 || { cat $(LOG).part >&2; echo 'make setup failed: $(1). What it said is above and in $(LOG)' >&2; }; \
	rm $(LOG).part; exit $$status

# The rooms that import no torch, or hardly any, are held to strict types; those not built yet are skipped.
ROOMS := files processes models clusters costs plans timing search batching schedules ordering programs stores data systems interop adapting jobs reports reproduce cli
TYPED := $(sort $(dir $(wildcard $(ROOMS:%=src/penstock/%/*.py)))) $(wildcard src/penstock/*.py)
# One more than there are cores: tests that start processes wait for them. A file stays with one process unless another runs out of work,
# so that what its tests share is made once.
TESTERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 7 ? cores + 1 : 8)))
KERNELS := $(shell grep -rl --include='*.py' numba src)

.PHONY: help setup demo test redis-server peers lint docs clean

help:
	@echo 'make setup   create $(VENV), install Penstock and compile its kernels'
	@echo 'make demo    the whole story on this machine'
	@echo 'make test    all tests'
	@echo 'make lint    ruff and mypy'
	@echo 'make docs    build the documentation into site/'
	@echo 'make clean   remove $(VENV) and everything built'

setup: $(VENV)/.compiled

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@echo "== $$(date)" >> $(LOG)
	@: torch alone and first, so that nothing after it brings another build
	$(call quietly,1/3 torch (minutes),$(PIP) torch)
	$(call quietly,2/3 Penstock and what it needs,$(PIP) --editable '.[$(EXTRAS)]')
	@touch $@

$(VENV)/.compiled: $(VENV)/.installed $(KERNELS)
	@find src -name "*.nb[ic]" -delete  # a cache of one kernel may hold types of another module that has changed
	$(call quietly,3/3 compiling kernels (a minute or two),$(BIN)/python -m penstock.kernels)
	@touch $@
	@echo 'ready: source $(BIN)/activate; all that was said is in $(LOG)'

demo: setup
	$(BIN)/penstock demo

# Each process would compile all of Penstock and all tests anew, for seconds, where it is not on disk, or Python was told to keep nothing
# compiled.
test: setup redis-server peers
	@$(BIN)/python -m compileall -q src
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TESTERS) --dist worksteal -r s

# Systems whose own code reads our exports in the tests; where they cannot be installed those tests are skipped and say so.
PEERS := $(VENV)/peers
peers: $(PEERS)/.installed

$(PEERS)/.installed: tests/interop/peers.txt $(VENV)/.installed
	@$(BIN)/python -m pip install -q --no-deps --target $(PEERS) --upgrade -r tests/interop/peers.txt > $(LOG).peers 2>&1 && touch $@ \
		|| echo 'systems that read our exports could not be installed ($(LOG).peers): the tests that need them will be skipped'

# Tests of the Redis store run against a real server; where it may not be installed they are skipped and say so.
redis-server:
	@command -v redis-server > /dev/null || { test "$$(id -u)" = 0 && apt-get install -y -q redis-server > /dev/null 2>&1; } \
		|| echo 'redis-server is missing: the tests that need it will be skipped'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy $(TYPED)

docs: setup
	$(PIP) --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache
