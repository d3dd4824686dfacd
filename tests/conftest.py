"""What all tests share: a quiet, seeded environment and a tiny dataset to train on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

# Some virtual machines announce AMX without granting it: bfloat16 products die of SIGILL there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests themselves run side by side
os.environ["WANDB_MODE"] = "offline"

PROJECT = Path(__file__).resolve().parent.parent
VOCABULARY = 64
TINY_MODEL = (
    "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=64 "
    "--batch_size=4 --gradient_accumulation_steps=2 --learning_rate=1e-2 --min_lr=1e-3 "
    "--warmup_iters=2 --max_iters=12 --eval_interval=6 --eval_iters=2 --log_interval=1 "
    "--device=cpu --compile=False"
).split()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory) -> Path:
    """Tokens that count upwards with a random stride: something a tiny model can learn."""
    folder = tmp_path_factory.mktemp("tiny")
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 4000), ("val", 600)):
        strides = random.integers(1, 4, count // 20)
        tokens = np.concatenate([np.arange(20) * s + s for s in strides]).astype(np.uint16)
        tokens %= VOCABULARY
        tokens.tofile(folder / f"{split}.bin")
        splits[split] = {"bins": [{"file": f"{split}.bin", "tokens": len(tokens)}]}
    meta = {"format": 1, "vocab_size": VOCABULARY, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def tiny_run(tiny_dataset, tmp_path):
    """Run train.py as a user does, on the tiny dataset; returns the finished process."""

    def run(*flags: str, out_dir: Path = tmp_path / "out", processes: int = 1):
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        return subprocess.run(
            [
                sys.executable,
                *(launcher if processes > 1 else []),
                str(PROJECT / "train.py"),
                *TINY_MODEL,
                f"--dataset={tiny_dataset}",
                f"--out_dir={out_dir}",
                *flags,
            ],
            cwd=out_dir.parent,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def read_metrics(out_dir: Path, kind: str, value: str) -> dict[int, float]:
    """One value by step; where a step was repeated after a resume, the later line counts."""
    lines = (out_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r[value] for r in records if r["kind"] == kind}
