"""What all tests share: a quiet, seeded environment and a tiny dataset to train on."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanofit.report.history import read_history
from tests import processes

# Some virtual machines announce AMX without granting it: bfloat16 products die of SIGILL there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests themselves run side by side
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
for wish in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # of who runs them
    os.environ.pop(wish, None)

PROJECT = processes.PROJECT
VOCABULARY = 64
TINY_MODEL = (
    "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=64 "
    "--batch_size=4 --gradient_accumulation_steps=2 --learning_rate=1e-2 --min_lr=1e-3 "
    "--warmup_iters=2 --max_iters=12 --eval_interval=6 --eval_iters=2 --log_interval=1 "
    "--device=cpu --compile=False --report=False"
).split()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    # As torch begins, whatever the test before has described or launched.
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session", autouse=True)
def _guarded():
    processes.guarded()


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory) -> Path:
    """What is simulated or compiled once serves all tests of a session, and no session after it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folders lie side by side
        folder = folder.parent
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.environ["HF_HOME"] = str(folder / "cache" / "huggingface")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache" / "compiled")
    return folder / "cache"


@pytest.fixture
def _no_garbage():
    """Let nothing be freed that an earlier test has left in a cycle: allocations are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _no_process_left():
    yield
    processes.end_all()


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory) -> Path:
    return write_tiny_dataset(tmp_path_factory.mktemp("tiny"))


def write_tiny_dataset(folder: Path) -> Path:
    """Tokens that count upwards with a random stride: something a tiny model can learn."""
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 4000), ("val", 600)):
        strides = random.integers(1, 4, count // 20)
        tokens = np.concatenate([np.arange(20) * s + s for s in strides]).astype(np.uint16)
        tokens %= VOCABULARY
        tokens.tofile(folder / f"{split}.bin")
        bins = [{"file": f"{split}.bin", "tokens": len(tokens)}]
        splits[split] = {"bins": bins, "tokens": len(tokens), "text_bytes": 3 * len(tokens)}
    meta = {"format": 1, "vocab_size": VOCABULARY, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def tiny_run(tiny_dataset, tmp_path):
    """Run train.py as a user does, on the tiny dataset; returns the finished process."""

    def run(*flags: str, out_dir: Path = tmp_path / "out", ranks: int = 1):
        return run_tiny(tiny_dataset, *flags, out_dir=out_dir, ranks=ranks)

    return run


def run_tiny(dataset: Path, *flags: str, out_dir: Path, ranks: int = 1):
    words = [*TINY_MODEL, f"--dataset={dataset}", f"--out_dir={out_dir}", *flags]
    if any(flag.startswith("--hours=") for flag in flags):  # beside it no other length is allowed
        words = [word for word in words if not word.startswith("--max_iters=")]
    if ranks == 1:
        return processes.run_script("train.py", *words, cwd=out_dir.parent)
    return processes.run_ranks(ranks, "train.py", *words, cwd=out_dir.parent)


def read_metrics(out_dir: Path, kind: str, value: str) -> dict[int, float]:
    """One value by step; where a step was repeated after a resume, the later line counts."""
    return {record["step"]: record[value] for record in read_records(out_dir, kind)}


def read_records(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Of whole lines: the last one may just be being written, or its writer was killed."""
    *lines, _ = (out_dir / "metrics.jsonl").read_text().split("\n")
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def read_events(out_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_records(out_dir, "event") if event["name"] == name]


def recorded(out_dir: Path) -> list[tuple]:
    """Every loss and norm that counts, by step."""
    run = read_history(out_dir)
    steps = zip(*(run.steps[name] for name in ("step", "loss", "grad_norm", "lr")), strict=True)
    return [*steps, *((one["step"], one["val_loss"]) for one in run.evaluations)]
