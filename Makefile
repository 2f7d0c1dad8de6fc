# `make demo` and `make test` do all the set-up themselves. Everything runs in .venv; nothing is written outside it,
# the tool caches and the folders named in .gitignore.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := permille/native/_kernels.so
# PyTorch's default wheels for Linux carry CUDA (several GB). Set this to the address of PyTorch's CPU wheels (its
# installation page names it) for a small install; where pip already finds a CPU wheel nothing is needed.
PERMILLE_TORCH_INDEX ?=
TORCH_INDEX := $(if $(PERMILLE_TORCH_INDEX),--index-url $(PERMILLE_TORCH_INDEX))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

export PYTHONUNBUFFERED = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: FORCE help venv smollm2 demo test lint types check-imports pytest system-packages lock sbom test-slow test-executorch chaos attack test-neon test-llama-cpp test-sanitized fuzz tuf-conformance kill-agent schemathesis hooks settings catalogue commands docs results bench-replay bench-engine bench-inference-engine gpu bench-learning bench-large bench-shards bench-decision bench-people bench-real bench-privacy bench-page bench-queue bench-service bench-estimators bench-paper bench-quantizers bench-sparse bench-federation oracle-pruning federation federation-long evidence example-model clean house bench-zeroth-order rollout

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: $(VENV)/.installed  ## Make the virtual environment (CPU torch, all extras)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "permille needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) install --constraint constraints.txt pip hatchling editables
	@$(PIP) install --constraint constraints.txt $(TORCH_INDEX) torch
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# The kernels are compiled at installation too; here again when a C source has changed or the library is gone.
$(VENV)/.native: $(VENV)/.installed permille/native/build.py $(wildcard permille/native/src/*) $(if $(wildcard $(KERNELS)),,FORCE)
	@$(BIN)/python -m permille.native.build
	@touch $@

# The chat model that the demo and one test use; neither fails where it cannot be fetched.
smollm2: $(VENV)/.installed  ## Fetch SmolLM2-135M-Instruct (93 MB, hash-checked) into build/smollm2
	@bash scripts/smollm2.sh $(BIN)/python

MODEL ?= smollm2
demo: $(VENV)/.native $(if $(filter smollm2,$(MODEL)),smollm2)  ## The whole product once, on a real chat model (minutes; MODEL=example: a tiny one)
	@$(BIN)/python -m examples.demo $(MODEL)

test: $(VENV)/.native system-packages smollm2 lint types check-imports pytest  ## Lint, types, import contracts and all tests

system-packages:
	@bash scripts/system-packages.sh

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check-imports: $(VENV)/.installed
	$(BIN)/lint-imports

# In memory, where there are 4 GB of it: tests flush thousands of files. Three processes on two cores, as tests wait.
TEST_FILES := $(shell [ -w /dev/shm ] && [ "$$(df --output=avail -k /dev/shm | tail -n 1)" -gt 4000000 ] && echo TMPDIR=/dev/shm)

pytest: $(VENV)/.native
	$(TEST_FILES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

lock: $(VENV)/.installed  ## Write requirements/ again: what API, worker and agent install, with hashes
	$(BIN)/python -m scripts.lock

# From the locks, so that it lists what is installed from them, and of this environment, with its licences.
sbom: $(VENV)/.installed  ## Write lists of components (CycloneDX) to build/sbom
	@mkdir -p build/sbom
	@for name in agent api worker cuda; do $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file build/sbom/$$name.cdx.json requirements/$$name.txt || exit 1; done
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom/environment.cdx.json $(BIN)/python
	@ls build/sbom

test-slow: $(VENV)/.native system-packages  ## Long kills, chaos and fuzz: what `make test` does in short
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# Its exporter's dependencies stay out of the environment: what we use of it needs these alone.
EXECUTORCH := build/executorch
$(EXECUTORCH)/.installed: $(VENV)/.installed
	@rm -rf $(EXECUTORCH)
	@$(PIP) install --no-deps --target $(EXECUTORCH) executorch==1.5.1 torchao==0.18.0 flatbuffers==25.12.19 ruamel.yaml==0.19.1 parameterized==0.9.0
	@touch $@

test-executorch: $(VENV)/.native $(EXECUTORCH)/.installed  ## Export programs and run them by ExecuTorch's runtime (minutes; a C++ compiler)
	PYTHONPATH=$(EXECUTORCH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m executorch tests/unit/engines

JOBS ?= 1000
chaos: $(VENV)/.native $(EXECUTORCH)/.installed system-packages  ## JOBS jobs while processes, broker, database and store fail; then count what is lost (a quarter of an hour where nothing else runs)
	@PYTHONPATH=$(EXECUTORCH) OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --jobs $(JOBS)

attack: $(VENV)/.native system-packages  ## Every attack of docs/explanation/security.md, on real processes (ten minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.attacks.run

test-neon: $(VENV)/.native  ## The kernels' tests on Arm: cross-compiled, run by an emulator (Debian: see the script)
	@bash scripts/neon-packages.sh
	PERMILLE_TEST_NEON=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/native -k neon

test-llama-cpp: $(VENV)/.native  ## Exported GGUF files in llama.cpp itself (builds it: 15 minutes, cmake and a C++ compiler)
	@$(BIN)/python -c 'import llama_cpp' 2>/dev/null || CMAKE_ARGS=-DLLAVA_BUILD=OFF $(PIP) install --constraint constraints.txt llama-cpp-python
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m llama_cpp

test-sanitized: $(VENV)/.native  ## The kernels' tests under AddressSanitizer and UBSan (gcc)
	bash scripts/test-sanitized.sh

fuzz: $(VENV)/.native  ## Fuzz the readers of packages and of GGUF files for ten minutes each
	$(BIN)/python -m tests.attacks.fuzz_reader --minutes 10
	$(BIN)/python -m tests.attacks.fuzz_gguf --minutes 10

tuf-conformance: $(VENV)/.installed  ## TUF's own tests of the agent's client (4 minutes; takes the suite from GitHub)
	@bash scripts/tuf-conformance.sh

KILLS ?= 50
kill-agent: $(VENV)/.native  ## Kill training agents at KILLS random moments, cut their journals as often, compare the bits
	$(BIN)/python -m tests.acceptance.kill_agent --run shared --kills $(KILLS) --cuts $(KILLS)
	$(BIN)/python -m tests.acceptance.kill_agent --run private --kills $(KILLS)

DATABASE ?= sqlite
schemathesis: $(VENV)/.installed  ## Call every operation of a stocked service with made-up requests, all checks (DATABASE=postgresql)
	$(BIN)/python -m tests.api_fuzz --examples 200 --database $(DATABASE)

hooks:  ## Check the subjects of your commits (a commit-msg hook of this repository)
	git config core.hooksPath scripts/hooks

settings: $(VENV)/.installed  ## Write docs/reference/settings.md from the settings classes
	$(BIN)/python -m scripts.settings

catalogue: $(VENV)/.installed  ## Write docs/reference/models.md from the catalogue of models
	$(BIN)/python -m scripts.catalogue

commands: $(VENV)/.installed  ## Write docs/reference/permille.md and permille-agent.md from the command lines
	$(BIN)/python -m scripts.commands

# In an environment of its own: MkDocs and its theme are no dependencies of the product or its tests.
SITE := build/site-venv
$(SITE)/.installed:
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip --disable-pip-version-check --quiet install mkdocs==1.6.1 mkdocs-material==9.8.2 pymdown-extensions==13.1.2
	@touch $@

docs: $(SITE)/.installed  ## Build the documentation as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

house: $(VENV)/.installed  ## Count statements, comments, docs and commits (BEFORE=revision: beside that revision)
	@$(BIN)/python -m permille_lab.house $(BEFORE)

results: $(VENV)/.installed  ## Write docs/results from lab/results
	$(BIN)/python -m permille_lab.pages

bench-replay: $(VENV)/.native  ## How long is the replay of 20,000 steps of 1.1M values?
	$(BIN)/python -m permille_lab.engine.replay

bench-engine: $(VENV)/.native  ## How fast and large is a step, beside dense passes, bitsandbytes and MeZO? (20 minutes)
	$(BIN)/python -m permille_lab.engine

bench-inference-engine: $(VENV)/.native $(EXECUTORCH)/.installed smollm2  ## How fast and large is a step by ExecuTorch, beside light, torch and plain passes? (an hour, resumable; needs PERMILLE_DATA)
	PYTHONPATH=$(EXECUTORCH) $(BIN)/python -m permille_lab.engine.inference

DEVICE ?= cuda
gpu: $(VENV)/.native  ## Test and measure the torch engine on a GPU (DEVICE=cpu: small, without one, 10 minutes)
	@$(BIN)/python -m permille_lab.engine.device --device $(DEVICE); status=$$?; $(BIN)/python -m permille_lab.pages && exit $$status

bench-learning: $(VENV)/.native  ## How fast does a model learn, beside first order and MeZO? (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.learning.compare

bench-large: $(VENV)/.native  ## Are mask and package of a 7B model made in 12 GiB? (44 GB of disk; `python -m permille_lab.large --layers 4`: 7)
	$(BIN)/python -m permille_lab.large

bench-shards: $(VENV)/.native  ## How much sooner is a mask made by four workers than by one? (minutes)
	$(BIN)/python -m permille_lab.service.shard_workers

bench-decision: $(VENV)/.installed  ## How often is a useless model adopted? (a simulation, two minutes)
	$(BIN)/python -m permille_lab.decision

bench-page: $(VENV)/.native  ## How long do the page's views take at 10,000 devices and 100,000 runs? (DATABASE=postgresql)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.page_times --database $(DATABASE)

bench-queue: $(VENV)/.installed  ## How fast is a claim at 10,000 queued and 1,000,000 ended jobs, on both databases? (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.queue_times

bench-service: $(VENV)/.native  ## Measure downloads beside nginx, and polls of 10,000 devices (minutes)
	@bash scripts/system-packages.sh wrk
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.service_times

bench-estimators: $(VENV)/.native  ## Which estimator learns most for its cost? (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.learning.estimators

bench-people: $(VENV)/.native  ## What does the agent make of twenty people's text? (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.people.users

bench-real: $(VENV)/.native smollm2  ## What does a personal SmolLM2 gain, and what does it cost? (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real --threads 1

bench-zeroth-order: $(VENV)/.native smollm2  ## Which zeroth order learns most at equal layer passes? (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real.zeroth_order --plain

bench-privacy: $(VENV)/.installed  ## What does an attacker learn of one device from the rounds? (five minutes)
	$(BIN)/python -m permille_lab.privacy

bench-quantizers: $(VENV)/.native  ## What does each form of the weights cost? (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.quantization

bench-sparse: $(VENV)/.native  ## What does a sparse model lose, by the way it became sparse? (needs PERMILLE_DATA, PERMILLE_MODELS)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse.device
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse.tasks

bench-federation: $(VENV)/.native  ## What do rounds gain, by method, text, attack, noise? (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.federation

bench-paper: $(VENV)/.native smollm2  ## The sensitive-sparse paper's table of accuracies on SmolLM2 (days, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.evidence.paper

oracle-pruning: $(VENV)/.native  ## Our pruning against llm-compressor's, installed in .oracle (needs PERMILLE_MODELS)
	@test -x .oracle/bin/python || $(PYTHON) -m venv .oracle
	@.oracle/bin/python -c 'import llmcompressor' 2>/dev/null || .oracle/bin/pip install llmcompressor==0.14.0.1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.oracles.pruning .oracle/bin/python $(wildcard $(PERMILLE_MODELS)/*M-hf $(PERMILLE_MODELS)/*K-hf $(PERMILLE_MODELS)/*M)

federation: $(VENV)/.native  ## 20 devices, 5 rounds, on the real service, with all that goes wrong (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.run --devices 20 --rounds 5 --deadline-s 30 --kills 2
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.secure_sums --rounds 20
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.crashes --trials 500

federation-long: $(VENV)/.native  ## 1,000 devices, 20 rounds (an hour or more)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.run --devices 1000 --rounds 20 --kills 6 --deadline-s 120
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.secure_sums --rounds 1000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.federation.crashes --trials 10000

rollout: $(VENV)/.native  ## A good version reaches 1,000 devices, four bad ones stop in the first wave (minutes; the service's processes are killed)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rollouts.run --devices 1000 --kills 4

bench-exports: $(VENV)/.native  ## What is left of a person's gain in llama.cpp? (needs PERMILLE_DATA, PERMILLE_MODELS, `make test-llama-cpp` before)
	$(BIN)/python -m permille_lab.exports

evidence: $(VENV)/.native  ## The papers' comparisons: hours, resumable (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.evidence

example-model: $(VENV)/.installed  ## Train the example model again from its sources (Debian with apt-get)
	$(BIN)/python -m examples.make_example_model --out examples/model --work build/example-model

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) build dist .demo .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(KERNELS)*
