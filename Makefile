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

.PHONY: FORCE help venv demo test lint types check-imports pytest system-packages test-neon test-sanitized fuzz kill-agent schemathesis bench-replay bench-engine bench-time-to-loss bench-compute-types bench-personalise bench-users bench-estimators bench-quantization bench-quantizers evidence example-model reference-model clean

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

demo: $(VENV)/.native  ## The whole product once: service, package, device, training, replay (minutes)
	@$(BIN)/python -m examples.demo

test: $(VENV)/.native system-packages lint types check-imports pytest  ## Lint, types, import contracts and all tests

system-packages:
	@bash scripts/system-packages.sh

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

check-imports: $(VENV)/.installed
	$(BIN)/lint-imports

pytest: $(VENV)/.native
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-neon: $(VENV)/.native  ## The kernels' tests on Arm: cross-compiled, run by an emulator (Debian: see the script)
	@bash scripts/neon-packages.sh
	PERMILLE_TEST_NEON=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/native -k neon

test-sanitized: $(VENV)/.native  ## The kernels' tests under AddressSanitizer and UBSan (gcc)
	bash scripts/test-sanitized.sh

fuzz: $(VENV)/.native  ## Fuzz the package reader for ten minutes
	$(BIN)/python -m permille_lab.benchmarks.fuzz_reader --minutes 10

kill-agent: $(VENV)/.native  ## Kill a training agent at 50 random moments and compare its bits
	$(BIN)/python -m permille_lab.benchmarks.kill_agent --kills 50

schemathesis: $(VENV)/.installed  ## Call every operation of a stocked service with made-up requests, all checks
	$(BIN)/python -m tests.api_fuzz --examples 200

bench-replay: $(VENV)/.native  ## Replay of 20,000 steps of 1.1M values
	$(BIN)/python -m permille_lab.benchmarks.replay

bench-engine: $(VENV)/.native  ## Steps, memory and decoding beside dense passes, bitsandbytes and MeZO (20 minutes)
	$(BIN)/python -m permille_lab.benchmarks.engine --output docs/results

bench-time-to-loss: $(VENV)/.native  ## Time to the losses of MeZO and of first order (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.time_to_loss --cells build/bench/loss.jsonl
	$(BIN)/python -m permille_lab.benchmarks.first_order --cells build/bench/loss.jsonl --output docs/results

bench-compute-types: $(VENV)/.native  ## Compute types that training bears (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.compute_types --cells build/bench/types.jsonl --output docs/results

bench-personalise: $(VENV)/.native  ## Held-out loss of several users, three seeds (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.personalise

bench-users: $(VENV)/.native  ## Own, pooled and strangers' states of many people (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.users --onward --restore docs/results/users.json --output docs/results

bench-estimators: $(VENV)/.native  ## Held-out loss by estimator at equal cost (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.estimators --output docs/results

bench-quantization: $(VENV)/.native  ## Perplexity by scheme and by knowledge of the mask (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.quantization_quality

bench-quantizers: $(VENV)/.native  ## Perplexity, bits per byte and bytes of every base (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.quantizers --output docs/results

evidence: $(VENV)/.native  ## The papers' comparisons and verdicts: hours, resumable (needs PERMILLE_DATA, PERMILLE_MODELS)
	$(BIN)/python -m permille_lab.benchmarks.evidence --restore docs/results --output docs/results

example-model: $(VENV)/.installed  ## Train the example model again from its sources (Debian with apt-get)
	$(BIN)/python -m examples.make_example_model --out examples/model --work build/example-model

reference-model: $(VENV)/.installed  ## Train the reference model from its sources: hours, resumable (needs PERMILLE_DATA, git)
	$(BIN)/python -m permille_lab.reference.fetch --texts build/reference/texts
	$(BIN)/python -m permille_lab.reference.prepare --data "$$PERMILLE_DATA" --texts build/reference/texts --out build/reference/corpus
	$(BIN)/python -m permille_lab.reference.train --corpus build/reference/corpus --run build/reference/run --steps 8000
	$(BIN)/python -m permille_lab.reference.train --corpus build/reference/corpus --run build/reference/run --decay 1600 --out build/reference/reference-6M
	$(BIN)/python -m permille_lab.reference.measure --data "$$PERMILLE_DATA" --model build/reference/reference-6M

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) build dist .demo .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(KERNELS)*
