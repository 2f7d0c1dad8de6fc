# `make demo` and `make test` do all the set-up. Everything runs in .venv. Files are written only there, in the tool
# caches, and in the folders that .gitignore names.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
KERNELS := permille/native/_kernels.so
# PyTorch's default wheels for Linux contain CUDA (several GB). For a small installation, set this to the address of
# PyTorch's CPU wheels, which its installation page names. It is not needed if pip finds a CPU wheel anyway.
PERMILLE_TORCH_INDEX ?=
TORCH_INDEX := $(if $(PERMILLE_TORCH_INDEX),--index-url $(PERMILLE_TORCH_INDEX))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

export PYTHONUNBUFFERED = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: FORCE help venv smollm2 demo test lint types check-imports pytest system-packages lock sbom release test-slow test-without test-executorch chaos pressure attack test-neon test-sanitized fuzz tuf-conformance kill-agent schemathesis hooks settings catalogue commands pictures docs results bench-replay bench-engine bench-inference-engine gpu bench-learning bench-large bench-shards bench-decision bench-people bench-real bench-curve bench-basis bench-privacy bench-page bench-queue bench-service bench-estimators bench-exports bench-paper bench-quantizers bench-sparse bench-federation oracle-pruning federation federation-long evidence example-model clean house bench-zeroth-order rollout

help:  ## List the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

venv: $(VENV)/.installed  ## Make the virtual environment (CPU torch, all extras)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "permille needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@echo "  1 of 3: pip and what builds permille (20 MB)"
	@$(PIP) install --constraint constraints.txt pip hatchling editables
	@echo "  2 of 3: torch (1 GB, or several GB with CUDA: see PERMILLE_TORCH_INDEX)"
	@$(PIP) install --constraint constraints.txt $(TORCH_INDEX) torch
	@echo "  3 of 3: permille and some 200 other packages (2 GB)"
	@$(PIP) install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

# The installation compiles the kernels, too. Compile again if a C source has changed or the library is missing.
$(VENV)/.native: $(VENV)/.installed permille/native/build.py $(wildcard permille/native/src/*) $(if $(wildcard $(KERNELS)),,FORCE)
	@$(BIN)/python -m permille.native.build
	@touch $@

# The chat model of the demo and of one test. Both also run if it cannot be downloaded.
smollm2: $(VENV)/.installed  ## Download SmolLM2-135M-Instruct (93 MB) to build/smollm2 and check its hash
	@bash scripts/smollm2.sh $(BIN)/python

MODEL ?= smollm2
export STACK
demo: $(VENV)/.native $(if $(filter smollm2,$(MODEL)),smollm2)  ## Run the whole product once on a real chat model (minutes; MODEL=example: a tiny model; STACK=full: with PostgreSQL, Redis, Celery)
	@$(BIN)/python -m examples.demo $(MODEL)

# The checks run beside the tests, which wait for much of their time.
test: $(VENV)/.native system-packages smollm2  ## Run linters, type checks, import contracts and the tests (eight minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 pytest lint types check-imports

system-packages:
	@bash scripts/system-packages.sh

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check-imports: $(VENV)/.installed
	$(BIN)/lint-imports

# Tests flush thousands of files, so use a folder in memory if it has 4 GB. Tests also wait, so use one process more
# than there are cores.
TEST_FILES := $(shell [ -w /dev/shm ] && [ "$$(df --output=avail -k /dev/shm | tail -n 1)" -gt 4000000 ] && echo TMPDIR=/dev/shm)

pytest: $(VENV)/.native
	$(TEST_FILES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

lock: $(VENV)/.installed  ## Write requirements/: locked dependencies of API, worker and agent, with hashes
	$(BIN)/python -m scripts.lock

# From the locks, so that the lists have the locked versions; and from this environment, with licences.
sbom: $(VENV)/.installed  ## Write lists of all components (CycloneDX) to build/sbom
	@mkdir -p build/sbom
	@for name in agent api worker cuda; do $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file build/sbom/$$name.cdx.json requirements/$$name.txt || exit 1; done
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom/environment.cdx.json $(BIN)/python
	@ls build/sbom

# The kernels' tests for Arm run with the library of the wheel.
release: $(VENV)/.native  ## Build sdist, wheels, Helm chart, lists of components, notes and checksums in dist (KEY=FILE: an SSH key signs them; needs Debian)
	@$(BIN)/python -m scripts.release --check
	@bash scripts/helm.sh
	@$(MAKE) --no-print-directory sbom
	@bash scripts/neon-packages.sh
	$(BIN)/python -m scripts.release $(if $(KEY),--key $(KEY))
	@rm -rf build/aarch64 && $(BIN)/python -m zipfile -e dist/*aarch64.whl build/aarch64
	PERMILLE_TEST_NEON=build/aarch64/permille/native/_kernels.so OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/native -k neon

test-slow: $(VENV)/.native system-packages smollm2  ## Run the tests that nobody waits for: attacks, whole flows, kills, fuzz (20 minutes)
	$(TEST_FILES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m slow

EXTENSION ?= permille_rollouts
test-without: $(VENV)/.native system-packages  ## Remove EXTENSION in a copy, and run all tests of the core there
	@rm -rf build/without
	$(TEST_FILES) OMP_NUM_THREADS=1 $(BIN)/python -m tests.without $(EXTENSION) build/without

# Without the exporter's other dependencies, because the part that we use needs only these.
EXECUTORCH := build/executorch
$(EXECUTORCH)/.installed: $(VENV)/.installed
	@rm -rf $(EXECUTORCH)
	@$(PIP) install --no-deps --target $(EXECUTORCH) executorch==1.5.1 torchao==0.18.0 flatbuffers==25.12.19 ruamel.yaml==0.19.1 parameterized==0.9.0
	@touch $@

test-executorch: $(VENV)/.native $(EXECUTORCH)/.installed  ## Export programs and run them in ExecuTorch's runtime (minutes; needs a C++ compiler)
	PYTHONPATH=$(EXECUTORCH) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m executorch tests/unit/engines

JOBS ?= 1000
chaos: $(VENV)/.native $(EXECUTORCH)/.installed system-packages  ## Run JOBS jobs while processes, broker, database and store fail, and count losses (15 minutes)
	@PYTHONPATH=$(EXECUTORCH) OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --jobs $(JOBS)

pressure: $(VENV)/.native system-packages  ## Let a table, Redis and sixty requests hang for a minute, and count slow answers
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.pressure

attack: $(VENV)/.native system-packages  ## Run every attack of docs/explanation/security.md on real processes (ten minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.attacks.run

test-neon: $(VENV)/.native  ## Run the kernels' tests for Arm in an emulator (needs Debian; see the script)
	@bash scripts/neon-packages.sh
	PERMILLE_TEST_NEON=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/native -k neon

test-sanitized: $(VENV)/.native  ## Run the kernels' tests with AddressSanitizer and UBSan (needs gcc)
	bash scripts/test-sanitized.sh

fuzz: $(VENV)/.native  ## Fuzz the readers of packages and of GGUF files for ten minutes each
	$(BIN)/python -m tests.attacks.fuzz_reader --minutes 10
	$(BIN)/python -m tests.attacks.fuzz_gguf --minutes 10

tuf-conformance: $(VENV)/.installed  ## Run TUF's own tests on the agent's client (4 minutes; downloads the suite from GitHub)
	@bash scripts/tuf-conformance.sh

KILLS ?= 50
kill-agent: $(VENV)/.native  ## Kill training agents at KILLS random moments, cut their journals, and compare the results
	$(BIN)/python -m tests.acceptance.kill_agent --run shared --kills $(KILLS) --cuts $(KILLS)
	$(BIN)/python -m tests.acceptance.kill_agent --run private --kills $(KILLS)

DATABASE ?= sqlite
schemathesis: $(VENV)/.installed  ## Call every API operation with generated requests (DATABASE=postgresql for PostgreSQL)
	$(BIN)/python -m tests.api_fuzz --examples 200 --database $(DATABASE)

hooks:  ## Install a hook that checks the subjects of your commits
	git config core.hooksPath scripts/hooks

settings: $(VENV)/.installed  ## Write docs/reference/settings.md from the settings classes
	$(BIN)/python -m scripts.settings

catalogue: $(VENV)/.installed  ## Write docs/reference/models.md from the catalogue of models
	$(BIN)/python -m scripts.catalogue

commands: $(VENV)/.installed  ## Write docs/reference/permille.md and permille-agent.md from the command lines
	$(BIN)/python -m scripts.commands

pictures: $(VENV)/.native system-packages smollm2  ## Make docs/images again: the web pages in Chromium, and a run of the demo (minutes)
	$(BIN)/python -m tests.console.page_site docs/images
	$(BIN)/python -m examples.picture

# MkDocs has its own environment, because neither the product nor its tests depend on it.
SITE := build/site-venv
$(SITE)/.installed:
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip --disable-pip-version-check --quiet install mkdocs==1.6.1 mkdocs-material==9.8.2 pymdown-extensions==13.1.2
	@touch $@

docs: $(SITE)/.installed  ## Build the documentation site in build/site (fails on broken links)
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

house: $(VENV)/.installed  ## Count statements, comments, docs and commits (BEFORE=REVISION adds a column)
	@$(BIN)/python -m permille_lab.house $(BEFORE)

results: $(VENV)/.installed  ## Write docs/results from lab/results
	$(BIN)/python -m permille_lab.pages

bench-replay: $(VENV)/.native  ## Measure the replay of 20,000 steps of 1.1 million values
	$(BIN)/python -m permille_lab.engine.replay

bench-engine: $(VENV)/.native  ## Measure time and memory of a step, beside dense passes, bitsandbytes and MeZO (20 minutes)
	$(BIN)/python -m permille_lab.engine

bench-inference-engine: $(VENV)/.native $(EXECUTORCH)/.installed smollm2  ## Measure a step in ExecuTorch, beside light, torch and plain passes (an hour, resumable; needs PERMILLE_DATA)
	PYTHONPATH=$(EXECUTORCH) $(BIN)/python -m permille_lab.engine.inference

DEVICE ?= cuda
gpu: $(VENV)/.native  ## Test and measure the torch engine on a GPU (DEVICE=cpu: a small run without GPU, 10 minutes)
	@$(BIN)/python -m permille_lab.engine.device --device $(DEVICE); status=$$?; $(BIN)/python -m permille_lab.pages && exit $$status

bench-learning: $(VENV)/.native  ## Measure how fast a model learns, beside first order and MeZO (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.learning.compare

bench-large: $(VENV)/.native  ## Build the mask and package of a 7B model in 12 GiB (44 GB of disk; 7 GB with `python -m permille_lab.large --layers 4`)
	$(BIN)/python -m permille_lab.large

bench-shards: $(VENV)/.native  ## Compare the time of a mask from four workers and from one (minutes)
	$(BIN)/python -m permille_lab.service.shard_workers

bench-decision: $(VENV)/.installed  ## Simulate how often a useless model is adopted (two minutes)
	$(BIN)/python -m permille_lab.decision

bench-page: $(VENV)/.native  ## Measure the pages with 10,000 devices and 100,000 runs (DATABASE=postgresql for PostgreSQL)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.page_times --database $(DATABASE)

bench-queue: $(VENV)/.installed  ## Measure a claim among 1,010,000 jobs, and a sweep over 5,000 waiting builds (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.queue_times

bench-service: $(VENV)/.native  ## Measure downloads, beside nginx, and polls of 10,000 devices (minutes)
	@bash scripts/system-packages.sh wrk
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.service.service_times

bench-estimators: $(VENV)/.native  ## Compare estimators at equal cost (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.learning.estimators

bench-people: $(VENV)/.native  ## Run the agent on the text of twenty people (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.people.users

bench-real: $(VENV)/.native smollm2  ## Measure gains and costs of a personal SmolLM2 (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real --threads 1

bench-curve: $(VENV)/.native smollm2  ## Compare training with a prompt by the length of a text (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real.curve

bench-basis: $(VENV)/.native smollm2  ## Compare directions learned from public text with groups (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real.basis --threads 1

bench-zeroth-order: $(VENV)/.native smollm2  ## Compare zeroth-order methods at equal layer passes (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.real.zeroth_order --plain

bench-privacy: $(VENV)/.installed  ## Measure what an attacker learns of a device from rounds (five minutes)
	$(BIN)/python -m permille_lab.privacy

bench-quantizers: $(VENV)/.native  ## Measure the loss and size of each storage of weights (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.quantization

bench-sparse: $(VENV)/.native smollm2  ## Compare ways to make a model sparse (needs PERMILLE_DATA, PERMILLE_MODELS)
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse.device
	OMP_NUM_THREADS=1 $(BIN)/python -m permille_lab.sparse.tasks

bench-federation: $(VENV)/.native  ## Compare rounds by method, text, attack and noise (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.federation

bench-paper: $(VENV)/.native smollm2  ## Repeat the sensitive-sparse paper's accuracies on SmolLM2 (hours, resumable; needs PERMILLE_DATA)
	$(BIN)/python -m permille_lab.evidence.coverage
	$(BIN)/python -m permille_lab.evidence.paper

oracle-pruning: $(VENV)/.native  ## Compare our pruning with llm-compressor's, installed in .oracle (needs PERMILLE_MODELS)
	@test -x .oracle/bin/python || $(PYTHON) -m venv .oracle
	@.oracle/bin/python -c 'import llmcompressor' 2>/dev/null || .oracle/bin/pip install llmcompressor==0.14.0.1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.oracles.pruning .oracle/bin/python $(wildcard $(PERMILLE_MODELS)/*M-hf $(PERMILLE_MODELS)/*K-hf $(PERMILLE_MODELS)/*M)

federation: $(VENV)/.native  ## Run 5 rounds of 20 devices on the real service, with faults (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.run --devices 20 --rounds 5 --deadline-s 30 --kills 2
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.secure_sums --rounds 20
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.crashes --trials 500

federation-long: $(VENV)/.native  ## Run 20 rounds of 1,000 devices (an hour or more)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.run --devices 1000 --rounds 20 --kills 6 --deadline-s 120
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.secure_sums --rounds 1000
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rounds.crashes --trials 10000

rollout: $(VENV)/.native  ## Roll out one good and four bad versions to 1,000 devices, killing the service's processes (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rollouts.run --devices 1000 --kills 4

bench-exports: $(VENV)/.native  ## Measure what llama.cpp keeps of a person's gain (an hour; needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.exports

evidence: $(VENV)/.native  ## Repeat the papers' comparisons (hours, resumable; needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.evidence

example-model: $(VENV)/.installed  ## Train the example model again from its sources (needs Debian with apt-get)
	$(BIN)/python -m examples.make_example_model --out examples/model --work build/example-model

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) build dist .demo .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(KERNELS)*
