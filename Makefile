# make demo: watch a small GPT learn.  make test: see it proven.  Both need only Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

SHARD ?= data/sample/sample.parquet

.PHONY: help demo test test-card test-card-all run-test-card lint bench-train-step bench-generate bench-memory bench-kernels bench-roofline bench-cards bench-autofit bench-prepare bench-prepare-large clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 24

demo: .venv/installed  ## make a sample shard, prepare it, train a small GPT, sample from it
	$(BIN)/python data/sample/make_shard.py --size 6MB --out data/sample/sample.parquet
	$(BIN)/python prepare_fineweb.py data/sample/sample.parquet --out data/sample
	$(BIN)/python train.py config/demo.py
	$(BIN)/python sample.py --out_dir=out-demo --start="One morning" --num_samples=2

test: lint  ## check the style, run the tests
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --ignore=tests/card

# Needs Linux on x86-64 and gcc; elsewhere there is nothing to run.
test-card: .venv/installed-dev  ## run every CUDA line, on a card without a GPU (installs 5 GB)
test-card-all: .venv/installed-dev  ## the same, with every config, compilation for six architectures, out-of-memory
test-card: CARD_TESTS := -m "not slow and not unproven"
test-card test-card-all:
	@if [ "$$(uname -sm)" = "Linux x86_64" ] && command -v gcc > /dev/null; then \
		$(MAKE) --no-print-directory run-test-card CARD_TESTS='$(CARD_TESTS)'; \
	else \
		echo "SKIPPED: no test of CUDA was run; a card without a GPU needs gcc and Linux on x86-64"; \
	fi

run-test-card: .venv-cuda/installed
	rm -rf .venv-cuda/coverage && mkdir .venv-cuda/coverage
	$(BIN)/python -m pytest tests/card -n auto --maxprocesses=2 $(CARD_TESTS)
	@.venv-cuda/bin/python tests/card/covered.py .venv-cuda/coverage || echo "coverage of CUDA is not complete"

lint: .venv/installed-dev  ## check format and style with ruff
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

bench-train-step: .venv/installed  ## one training step, ours against nanoGPT's way
	$(BIN)/python bench/train_step.py config/train_small_30m.py \
		--batch_size=12 --block_size=1024 --dtype=float32

bench-generate: .venv/installed  ## sampling with and without the key-value cache
	$(BIN)/python bench/generate.py config/train_gpt2_124m.py

bench-memory: .venv/installed  ## what fits a 12 GB card, simulated: nanoGPT's way, ours, each saver
	$(BIN)/python bench/memory.py

bench-kernels: .venv/installed  ## launches and bytes of a step on a card without a GPU; NANOGPT=.../model.py compares
	$(BIN)/python bench/kernels.py $(if $(NANOGPT),--nanogpt $(NANOGPT))

bench-roofline: .venv/installed  ## speed on many cards by FLOPs and bytes, against published runs
	$(BIN)/python bench/roofline.py

bench-cards: .venv-cuda/installed  ## what fits on which card, on torch's CUDA allocator without a GPU
	$(BIN)/python bench/cards.py

bench-autofit: .venv/installed-bench  ## finding a micro-batch, ours against accelerate's and others' ways
	$(BIN)/python bench/autofit.py

bench-prepare: .venv/installed-extras  ## prepare SHARD=..., ours against nanoGPT's and llm.c's ways
	$(BIN)/python bench/prepare.py $(SHARD)

bench-prepare-large: .venv/installed  ## peak memory on shards that are hard to hold
	$(BIN)/python bench/prepare_large.py

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

.venv/installed-extras: .venv/installed requirements-extras.txt
	$(INSTALL) -r requirements-extras.txt
	touch $@

.venv/installed-bench: .venv/installed requirements-bench.txt requirements-extras.txt
	$(INSTALL) -r requirements-bench.txt
	touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt requirements-extras.txt
	$(INSTALL) -r requirements-dev.txt
	touch $@
