# make demo: watch a small GPT learn.  make test: see it proven.  Both need only Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
BENCH := .venv-bench/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

SHARD ?= data/sample/sample.parquet

.PHONY: help demo test test-all test-card run-test-card fuzz soak audit lint bench bench-train-step bench-loop bench-loss bench-generate bench-memory bench-kernels bench-roofline bench-cards bench-recipe bench-muon bench-report bench-startup bench-autofit bench-prepare bench-prepare-kinds bench-prepare-large pictures clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 24

# A limit of memory on a CPU needs Linux; with it the micro-batch is found as on a GPU.
DEMO_LIMIT := $(if $(filter Linux,$(shell uname -s)),--memory_limit=2GB)
define DEMO_ENDS

That was all of it: shard, plan, fit, training, text. What to do next:

  source .venv/bin/activate

  let it learn on, from where it is
    python train.py config/demo.py --max_iters=1600 $(DEMO_LIMIT)
  ask it for more
    python sample.py --out_dir=out-demo --start="The old house"
  train on FineWeb: get 000_00000.parquet (2.1 GB) from
  https://huggingface.co/datasets/HuggingFaceFW/fineweb/tree/main/data/CC-MAIN-2013-20
    python prepare_fineweb.py 000_00000.parquet
    python train.py config/train_fineweb_4070.py
  look at the story of this run in a browser
    $(CURDIR)/out-demo/report.html
endef
export DEMO_ENDS

demo: .venv/installed  ## make a sample shard, prepare it, plan, fit, train a small GPT, sample from it
	$(BIN)/python data/sample/make_shard.py
	$(BIN)/python prepare_fineweb.py data/sample/sample.parquet --out data/sample
	$(BIN)/python plan.py config/demo.py
	$(if $(DEMO_LIMIT),$(BIN)/python autofit.py config/demo.py $(DEMO_LIMIT))
	$(BIN)/python train.py config/demo.py $(DEMO_LIMIT)
	$(BIN)/python sample.py --out_dir=out-demo --start="One morning" --num_samples=2
	@echo "$$DEMO_ENDS"

# In random order, which --randomly-seed, printed at the beginning, repeats. What is slow waits more
# than it computes.
test: lint  ## check the style, run the tests but for the slow ones: minutes
test-all: lint  ## check the style, run all tests that need no card
test: TESTS := -m "not slow"
test: WORKERS := -n auto --maxprocesses=4
test-all: WORKERS := -n 3
test test-all:
	$(BIN)/python -m pytest $(WORKERS) --ignore=tests/card $(TESTS)

# Needs Linux on x86-64 and gcc; elsewhere there is nothing to run.
test-card: .venv/installed-dev  ## run every CUDA line, on a card without a GPU (installs 5 GB)
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && command -v gcc > /dev/null; then \
		$(MAKE) --no-print-directory run-test-card; \
	else \
		echo "SKIPPED: no test of CUDA was run; a card without a GPU needs gcc and Linux on x86-64"; \
	fi

run-test-card: .venv-cuda/installed
	rm -rf .venv-cuda/coverage && mkdir .venv-cuda/coverage
	$(BIN)/python -m pytest tests/card -p no:randomly -n 3
	@.venv-cuda/bin/python tests/card/covered.py .venv-cuda/coverage

fuzz: .venv/installed-dev  ## 10,000 damaged inputs for each reader of files
	NANOFIT_FUZZ=10000 $(BIN)/python -m pytest -n auto --maxprocesses=4 \
		$(shell find tests -name 'test_fuzz_*.py')

# An hour of kills, full disks and the like; the seed that is printed repeats a storm.
MINUTES ?= 60
soak: .venv/installed-dev  ## training and preparation in a storm of faults: MINUTES=60 SEED=...
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: .venv/installed-dev  ## check format, style, and which room imports which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache > .venv/imports.txt || { cat .venv/imports.txt; exit 1; }

# --strict: a package that its service does not know is told as such, and is not called sound.
audit: .venv-audit/installed .venv/installed-dev  ## look for unsafe code, and for packages with known holes
	.venv-audit/bin/bandit --quiet --configfile pyproject.toml --recursive nanofit *.py
	.venv-audit/bin/pip-audit --strict \
		--path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

bench: .venv-bench/installed  ## every benchmark, at a size that ends in 20 minutes, and the table of all figures
	$(BENCH)/python bench/all.py

bench-loop: .venv/installed  ## what a step costs besides its work, and the loader, beside nanoGPT's
	$(BIN)/python bench/loop.py

bench-loss: .venv/installed  ## the loss alone, every way torch has against ours
	OMP_NUM_THREADS=1 $(BIN)/python bench/loss.py

bench-train-step: .venv-bench/installed  ## one training step, ours against nanoGPT's way and other trainers' models
	$(BENCH)/python bench/train_step.py config/train_small_30m.py \
		--batch_size=12 --block_size=1024 --dtype=float32

bench-generate: .venv/installed  ## sampling with and without the key-value cache
	$(BIN)/python bench/generate.py config/train_gpt2_124m.py

bench-memory: .venv/installed  ## what fits a 12 GB card, simulated: nanoGPT's way, ours, each saver
	$(BIN)/python bench/memory.py

bench-kernels: .venv/installed .venv-cuda/installed  ## launches and bytes of a step on a card without a GPU; NANOGPT=.../model.py compares
	$(BIN)/python bench/kernels.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

bench-roofline: .venv/installed  ## speed on many cards by FLOPs and bytes, against published runs
	$(BIN)/python bench/roofline.py

bench-cards: .venv/installed .venv-cuda/installed  ## what fits on which card, on torch's CUDA allocator without a GPU
	$(BIN)/python bench/cards.py

bench-recipe: .venv/installed-extras  ## tokens that a recipe needs, ours against nanoGPT's: hours; it continues
	$(BIN)/python bench/recipe.py

bench-muon: .venv/installed  ## Muon's update, batched against torch's, and its share of a step
	$(BIN)/python bench/muon.py

bench-report: .venv/installed-dev  ## the page of a run of 250,000 steps: to write, to send, to open
	$(BIN)/python bench/report.py

bench-startup: .venv/installed  ## how long one waits for --help, for a plan, for the demo's first step
	$(BIN)/python bench/startup.py

bench-autofit: .venv-bench/installed  ## finding a micro-batch, ours against accelerate's and others' ways
	$(BENCH)/python bench/autofit.py

bench-prepare: .venv-bench/installed  ## prepare SHARD=..., ours against nanoGPT's and llm.c's ways
	$(BENCH)/python bench/prepare.py $(SHARD)

bench-prepare-kinds: .venv/installed  ## prepare SHARD=..., as JSON Lines and text beside parquet
	$(BIN)/python bench/prepare_kinds.py $(SHARD)

bench-prepare-large: .venv/installed  ## peak memory on shards that are hard to hold
	$(BIN)/python bench/prepare_large.py

pictures: .venv/installed-dev  ## the README's pictures, of the report of make demo and of --explain; needs chromium
	$(BIN)/python docs/pictures.py

clean:  ## remove what make demo made, but not the installed packages
	rm -rf out-demo data/sample/*.bin data/sample/*.parquet data/sample/meta.json

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than 3.11; use make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the packages of requirements.txt (torch is large: a few minutes)"
	$(INSTALL) -r requirements.txt
	touch $@

# The CUDA build of torch, also where pip prefers a CPU build that lies on disk.
.venv-cuda/installed: requirements.txt requirements-card.txt
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	@echo "installing the CUDA build of torch into .venv-cuda (5 GB: a few minutes)"
	env -u PIP_FIND_LINKS .venv-cuda/bin/python -m pip install --isolated --quiet \
		--disable-pip-version-check -r requirements-card.txt
	.venv-cuda/bin/python -c 'import torch; assert torch.version.cuda, "this torch has no CUDA"'
	touch $@

# Of its own: what looks at packages should not be among them.
.venv-audit/installed: requirements-audit.txt
	test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check \
		-r requirements-audit.txt
	touch $@

.venv/installed-extras: .venv/installed requirements-extras.txt
	$(INSTALL) -r requirements-extras.txt
	touch $@

# Of their own: peers want other versions than ours of what both need.
.venv-bench/installed: requirements.txt requirements-extras.txt requirements-bench.txt
	test -x $(BENCH)/python || $(PYTHON) -m venv .venv-bench
	@echo "installing the peers of the benchmarks into .venv-bench (a few minutes)"
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check --no-deps 'litgpt>=0.5.13,<0.6'
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt requirements-extras.txt
	$(INSTALL) -r requirements-dev.txt
	touch $@
