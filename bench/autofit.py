"""How autofit finds a micro-batch beside accelerate, Lightning and Composer's rule, in real trials.

    python bench/autofit.py [--limits 10] [--rechecks 20] [--log FILE]

One small model on one CPU thread under limits of the process' data, so that memory really runs
out. The limits leave rooms in geometric order, for one sequence up to about a hundred. Each way
runs in a process of its own; all get the same room beyond what their process holds before there
is a model, so that no library pays for its imports. What truly fits is found by trying every size
around the edge. With --log an interrupted bench goes on where it was.
"""

import argparse
import gc
import io
import json
import multiprocessing
import os
import platform
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import nanofit.fit
from model import GPT, GPTConfig
from nanofit.config import RunConfig, TrainConfig
from nanofit.device import describe_device, is_out_of_memory
from nanofit.dist import Ranks
from nanofit.loader import MicroBatch
from nanofit.memory import Setup, memory_curve
from nanofit.optim import build_optimizer
from nanofit.step import train_step
from nanofit.trial import run_trial

MIB = 2**20
SHAPE = GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=64, vocab_size=8192)
SETUP = Setup(SHAPE, dtype="float32", loss="full")
LEARN = TrainConfig()
SEQUENCES = LEARN.sequences_per_step
ROOM_BYTES = 24 * MIB, 720 * MIB  # of the tightest limit, and of the widest
WARMING = 1.2  # so far inside of these two lie the limits of the fits that warm a cache
EDGE = 2  # sizes on either side of the edge that are all tried
NEEDED = 3  # trials out of as many that a size has to survive to count as fitting


@dataclass
class Search:
    """What a way did and chose; a trial is a size and whether it survived."""

    size: int = 0
    trials: list[tuple[int, bool]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    forecast_bytes: int | None = None  # of the chosen size
    peak_bytes: int | None = None


def main() -> None:
    arguments = parse()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](**json.loads(arguments.order))))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    base_bytes = run_trial(SETUP, 0, device="cpu", limit_bytes=None).used_bytes
    log = Log(arguments.log)
    warm = warm_cache(base_bytes)
    results = []
    for limit_bytes in limits(arguments.limits, base_bytes):
        place = dict(limit_bytes=limit_bytes, base_bytes=base_bytes)
        result = dict(limit_bytes=limit_bytes, truth=log.ask("truth", **place))
        result["ways"] = {way: log.ask(way, **place, cache=warm.name) for way in WAYS}
        sizes = sorted({search["size"] for search in result["ways"].values()})
        result["survived"] = log.ask("recheck", **place, sizes=sizes, times=arguments.rechecks)
        results.append(result)
    print_report(results, base_bytes, arguments.rechecks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, default=10)
    parser.add_argument("--rechecks", type=int, default=20)
    parser.add_argument("--log", type=Path, help="keep every result here, and use those kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    return parser.parse_args()
