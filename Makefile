# Every target sets up what it needs: a machine with python3 (>= 3.11), git and make is enough.
#
#   PYTHON=python3.12     the interpreter that makes the environment
#   VENV=.venv            where the environment is kept; made again when setup.py changes
#   SHARD=0/4             for test-slow: the first quarter of the slow tests; results in runs/test-slow
#   SPECJAX_DATA=<path>   evaluation sets and reference data; tests that need them are skipped without it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
SHARD ?= 0/1

# A path that was asked for must exist; the default may be absent.
SPECJAX_DATA ?= ../shared/data
ifneq ($(wildcard $(SPECJAX_DATA)/.),)
  override SPECJAX_DATA := $(abspath $(SPECJAX_DATA))
  export SPECJAX_DATA
else ifneq ($(origin SPECJAX_DATA),file)
  $(error SPECJAX_DATA=$(SPECJAX_DATA) is not a directory: give the directory that holds spec_bench/, humaneval/ and the like, or leave it unset)
else
  unexport SPECJAX_DATA
endif

# Most of the tests' time goes into compiling tiny programs: without the backend's optimisations and its second code
# generator, the loop of a contract test compiles in 3.6 CPU seconds, not 9. XLA ends a process over a flag that it does
# not know, and newer ones know the second no more. Programs are not kept for the next run: writing them costs a first
# run what it would save, and has crashed.
TEST_XLA = --xla_backend_optimization_level=0 $(shell $(PY) -c 'from jaxlib.version import __version_info__ as version; \
  print("--xla_cpu_use_fusion_emitters=false" if version < (0, 11) else "")')
TEST_ENV := JAX_PLATFORMS=cpu
# XLA compiles a program on one core: two processes of pytest share two cores better than one does. A file's tests stay
# together, for what they prepare.
PARALLEL := -n 2 --dist loadfile
DISTRIBUTED := $(sort $(wildcard tests/distributed/test_*.py))

.PHONY: small help demo test test-slow test-distributed test-gpu lint format types bench report notebooks zoo clean

help:
	@echo "make demo              measure speculative decoding on a small instruct model (runs/quickstart)"
	@echo "make test              the tests, those in tests/distributed on 8 simulated devices"
	@echo "make test-slow         the tests that take long or need a download, every drafter with every rule among them;"
	@echo "                       SHARD=0/4 runs the first quarter. Results: runs/test-slow/"
	@echo "make test-distributed  only the tests on 8 simulated devices, each file in its own process"
	@echo "make test-gpu          whether all is as it should be on this machine's GPU (some minutes; runs/check_device)"
	@echo "make lint, make types  ruff; mypy"
	@echo "make format            lay out the code as lint wants it"
	@echo "make bench             the quickstart's methods, at every draft length, on every shipped prompt (runs/full)"
	@echo "make report            one page of all benchmark runs in runs/ (runs/report.html)"
	@echo "make small             the papers' small studies (3 hours on 2 cores; goes on where it was interrupted)"
	@echo "make notebooks         run the notebooks again, and keep what they show"
	@echo "make zoo               train the drafters that ship in specjax/zoo again (runs/zoo)"
	@echo "make clean             remove the environment, caches and build products; runs/ stays"

demo: $(VENV)/.core
	@echo "== demo: fetches SmolLM2-135M-Instruct on the first run (89 MB, kept in a cache)"
	$(PY) -m experiments.benchmark --config=configs/quickstart.py --workdir=runs/quickstart

test: $(VENV)/.test
	$(TEST_ENV) XLA_FLAGS="$(TEST_XLA) $${XLA_FLAGS:-}" $(PY) -m pytest -m "not slow" --ignore=tests/distributed $(PARALLEL)
	@$(call run-distributed,not slow)

# Laws are drawn by the hundred thousand, so their programs are worth optimising; the others run once.
test-slow: $(VENV)/.test
	$(TEST_ENV) XLA_FLAGS="$(TEST_XLA) $${XLA_FLAGS:-}" $(call slow-tests,not law,rest)
	$(TEST_ENV) $(call slow-tests,law,laws)
	@[ $(firstword $(subst /, ,$(SHARD))) -ne 0 ] || { $(call run-distributed,slow) }

slow-tests = $(PY) -m pytest -m slow -k "$(1)" --ignore=tests/distributed --shard=$(SHARD) \
  --junitxml=runs/test-slow/$(2)-$(subst /,-of-,$(SHARD)).xml

test-distributed: $(VENV)/.test
	@$(call run-distributed,not slow)

# The number of devices is fixed when JAX starts, and a test that hangs must not take the others with it. A file may have
# no test of the kind that is asked for (pytest's status 5).
define run-distributed
for file in $(DISTRIBUTED); do \
  echo "== $$file"; \
  $(TEST_ENV) XLA_FLAGS="$(TEST_XLA) --xla_force_host_platform_device_count=8 $${XLA_FLAGS:-}" $(PY) -m pytest -m "$(1)" $$file \
    || { status=$$?; [ $$status -eq 5 ] || exit $$status; }; \
done
endef

# JAX finds a GPU with the extra of its driver: make test-gpu VENV=<an environment with specjax[cuda13]>.
test-gpu: $(VENV)/.core
	@if $(PY) -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' 2>/dev/null; \
	then $(PY) -m experiments.check_device --config=configs/check_device.py --workdir=runs/check_device; \
	else echo "skipped: JAX sees no GPU here; on a machine with one, $(VENV)/bin/pip install 'specjax[cuda13]'"; fi

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.dev
	$(VENV)/bin/mypy

bench: $(VENV)/.core
	$(PY) -m experiments.benchmark --config=configs/quickstart.py:full --workdir=runs/full

# Other programs write a results.json of their own kind.
report: $(VENV)/.core
	$(PY) -m experiments.report $$(grep -ls '"specjax.benchmark/' runs/*/results.json) --out=runs/report.html

small: $(VENV)/.core
	$(PY) -m experiments.small --minutes=170

notebooks: $(VENV)/.test
	$(PY) -m experiments.notebooks

# As the cards in specjax/zoo say. An interrupted line goes on where it was. Entries to be looked at before they are
# copied to specjax/zoo: runs/zoo/entries.
zoo: $(VENV)/.core
	$(PY) -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2 \
	  --config.store.taps="(2, 15, 27)"
	$(PY) -m experiments.make_prompts --config=configs/make_prompts.py:zoo --workdir=runs/zoo/prompts
	$(PY) -m experiments.regenerate --config=configs/regenerate.py:smollm2 --workdir=runs/zoo/regenerate \
	  --config.prompts=$(CURDIR)/runs/zoo/prompts/prompts.jsonl --config.max_prompts=2048
	$(PY) -m experiments.hidden_states --config=configs/hidden_states.py:smollm2 --workdir=runs/hidden/smollm2_more \
	  --config.store.taps="(2, 15, 27)" --config.parts.train.text=$(CURDIR)/runs/zoo/regenerate/answers
	gzip -dc "$${SPECJAX_DATA:-../shared/data}/target_text/smollm2-135m-instruct.train.jsonl.gz" > runs/zoo/text.jsonl
	cat runs/zoo/regenerate/answers/part-*.jsonl >> runs/zoo/text.jsonl
	$(call zoo-entry,eagle,$(call zoo-long,2400,400))
	$(call zoo-entry,eagle3,$(call zoo-long,2600,325))
	$(call zoo-entry,distill,$(call zoo-long,2400,400),distilled)
	$(call zoo-entry,medusa,$(ZOO_SHORT))
	$(call zoo-entry,hydra,$(ZOO_SHORT))
	$(call zoo-entry,kangaroo,$(call zoo-long,2000,250))
	$(PY) -m experiments.train --config=configs/ensemble_drafts.py:reasoning --workdir=runs/zoo/ensemble_reasoning
	$(PY) -m experiments.train --config=configs/ensemble_drafts.py:code --workdir=runs/zoo/ensemble_code
	$(PY) -m experiments.train --config=configs/ensemble_drafts.py:mixed --workdir=runs/zoo/ensemble_mixed

define zoo-entry
	$(PY) -m experiments.train --config=configs/$(1).py:smollm2 --workdir=runs/zoo/$(1) $(2)
	[ -e runs/zoo/entries/smollm2-135m-$(or $(3),$(1))/config.json ] || $(PY) -m experiments.pack_zoo \
	  --from=runs/zoo/$(1) --to=runs/zoo/entries/smollm2-135m-$(or $(3),$(1)) \
	  --config.paths='(("$(CURDIR)/runs", "$$PWD/runs"),)'
endef

# Updates, and updates from one evaluation to the next, over all of the text.
define zoo-long
--config.data.text=$(CURDIR)/runs/zoo/text.jsonl \
  --config.data.store=runs/hidden/smollm2/train,runs/hidden/smollm2_more/train --config.train.batch=2 \
  --config.train.steps=$(1) --config.train.eval_every=$(2) --config.optimizer.steps=$(1) --config.optimizer.warmup=60 \
  --config.optimizer.learning_rate=1.5e-3
endef

# About as many tokens as an hour on two slow cores allows, of the first 12 shards.
ZOO_SHORT := --config.data.max_shards=12 --config.train.batch=2 --config.train.steps=820 --config.train.eval_every=205 \
  --config.optimizer.steps=820 --config.optimizer.warmup=40

clean:
	rm -rf $(VENV) .venv-ci .cache .ruff_cache build dist specjax.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. A stamp stands for what has been installed, and goes stale with setup.py.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"specjax needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	@echo "== making the environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: setup.py $(VENV)/.python
	@echo "== installing specjax: downloads about 300 MB, 1.3 GB on disk; no torch"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "== installing what the tests need: torch 2.13 (its CPU build: 200 MB, 0.9 GB on disk) and pytest"
	@echo "   On Linux, pip's default build of torch brings CUDA and is several GB: to avoid it, name PyTorch's CPU"
	@echo "   index in PIP_EXTRA_INDEX_URL."
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "== installing ruff, mypy and pre-commit: downloads about 35 MB, 0.1 GB on disk"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
