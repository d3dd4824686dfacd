"""A trial: the real training step in a child process, to see whether it survives.

Whatever happens there, out of memory, a crash of the driver, a kill or a hang, is an answer; it
reaches neither the weights nor the memory of the run. The child is `python -m nanofit.fit.trial`,
and ends with its parent, however that ends.
"""

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from model import GPT
from nanofit.cache import private_folder
from nanofit.data.loader import random_micro_batches
from nanofit.files import PROJECT
from nanofit.learning.compiler import compile_in_place
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import evaluate, train_step
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.memory import is_out_of_memory
from nanofit.memory.setup import Setup
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import first_line

# Large enough for libraries to set up all that they will use.
WARM_UP = GPTConfig(n_layer=1, n_head=1, n_embd=128, block_size=256, vocab_size=4096)
TIMEOUT_S = 900.0  # to compile a large model takes minutes
_ANSWER = "trial: "
_OF_THE_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TrialResult:
    """What a trial told; without a peak it did not survive, for the reason given."""

    peak_bytes: int | None = None
    peak_allocated_bytes: int | None = None  # of that by tensors
    is_too_large: bool = False  # rather than broken, which a smaller size would be as well
    free_bytes: int | None = None  # before it began
    used_bytes: int = 0  # without any tensor
    held_bytes: int = 0  # of that by libraries, in pieces that leave room in between
    library_bytes: int = 0  # outside torch, from the first step on
    context_bytes: int | None = None  # of a process that does nothing yet
    retries: int = 0  # of allocations
    spilled_bytes: int = 0  # into the host's memory
    tokens_per_s: float = 0.0
    reason: str = ""


def run_trial(
    setup: Setup,
    micro_batch_size: int,
    *,
    device: str,
    limit_bytes: int | None,
    timeout_s: float = TIMEOUT_S,
) -> TrialResult:
    """Two steps of two micro-batches and an evaluation, in a child; size 0 only looks around."""
    order = {
        "setup": asdict(setup),
        "micro_batch_size": micro_batch_size,
        "device": device,
        "limit_bytes": limit_bytes,
    }
    try:
        done = _run_child(order, timeout_s)
    except subprocess.TimeoutExpired:
        return TrialResult(is_too_large=True, reason=f"no answer within {timeout_s:.0f} s")
    if done.returncode == -signal.SIGINT:  # Ctrl-C reaches the child as well
        raise KeyboardInterrupt
    # Whoever has answered has done its work: torch may still abort when a process ends, where a
    # thread of autograd's waits for an interpreter that is already going.
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return TrialResult(**json.loads(line.removeprefix(_ANSWER)))
    if done.returncode < 0:
        return TrialResult(is_too_large=True, reason=f"killed by signal {-done.returncode}")
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return TrialResult(reason=said[-1].strip() if said else f"exit code {done.returncode}")


def _run_child(order: dict[str, Any], timeout_s: float) -> subprocess.CompletedProcess:
    """The child reads from a pipe that nobody writes to, and that closes when this process dies."""
    child_end, our_end = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-m", "nanofit.fit.trial", json.dumps(order)],
            cwd=PROJECT,
            env=_environment(),
            stdin=child_end,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    finally:
        os.close(child_end)
        os.close(our_end)


def _end_with_parent() -> None:
    """End this process when its parent's end of the pipe closes, whatever it is doing then."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # sys.stdin itself has a lock, which the exit would wait for
        os._exit(1)

    usual_bytes = threading.stack_size(
        2**18
    )  # which count as data of the trial: 8 MiB are too many
    threading.Thread(target=wait, daemon=True).start()
    threading.stack_size(usual_bytes)


def share_compile_cache() -> None:
    """Keep what is compiled, so that a run finds what its trial compiled, and its resume too.

    By itself torch keeps it in the system's temporary folder, under a name that anybody could take
    first: what cannot be kept is compiled in a folder for this process and its trials.
    """
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    kept = private_folder()
    folder = kept / "compiled" if kept else Path(mkdtemp(prefix="nanofit-compiled-"))
    if not kept:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OF_THE_RUN}


def trial_here(
    setup: Setup, micro_batch_size: int, *, device: str, limit_bytes: int | None
) -> TrialResult:
    """The same in this process, which should have no other use for its device."""
    described = describe_device(device, setup.dtype, deterministic=setup.deterministic)
    if not micro_batch_size:
        try:
            return _look_around(setup, described)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return TrialResult(reason="its memory is full; end what uses it, or wait")
    described.enter_thread()
    memory = described.memory()
    before = TrialResult(free_bytes=memory.free_bytes(), used_bytes=memory.used_bytes())
    if limit_bytes:
        memory.limit(limit_bytes)
    memory.forget_peak()
    retries = memory.retries()
    try:
        tokens_per_s = _train(setup, micro_batch_size, described)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return replace(before, is_too_large=True, reason=f"out of memory: {first_line(error)}")
    return replace(
        before,
        peak_bytes=memory.peak_bytes(),
        peak_allocated_bytes=memory.peak_allocated_bytes(),
        retries=memory.retries() - retries,
        spilled_bytes=memory.spilled_bytes(),
        tokens_per_s=tokens_per_s,
    )


def _answer(order: dict[str, Any]) -> TrialResult:
    described = order.pop("setup")
    shape = GPTConfig(**described.pop("shape"))
    return trial_here(Setup(shape, **described), **order)


def _look_around(setup: Setup, device: Device) -> TrialResult:
    """What is free, and what this process uses as soon as it computes anything."""
    memory = device.memory()
    memory.return_freed()
    others_bytes = memory.on_card_bytes()
    device.enter_thread()
    free_bytes = memory.free_bytes()
    _train(replace(setup, shape=WARM_UP, compiled=False), 1, device)
    gc.collect()  # an optimiser with hooks is a cycle, and holds its tensors
    memory = device.memory()
    look = TrialResult(
        free_bytes=memory.free_bytes(),
        used_bytes=memory.used_bytes(),
        held_bytes=memory.held_bytes(),
    )
    if free_bytes is not None:
        look = replace(look, library_bytes=max(free_bytes - look.free_bytes, 0))
    if others_bytes is not None:
        own_bytes = memory.on_card_bytes() - others_bytes - look.used_bytes - look.library_bytes
        look = replace(look, context_bytes=max(own_bytes, 0))
    return look


def _train(setup: Setup, size: int, device: Device) -> float:
    """Do what a run does; return the speed of the second step."""
    model = GPT(setup.shape, loss=setup.loss, recompute=setup.recompute).to(device.torch_device)
    optimizer = build_optimizer(
        model,
        TrainConfig(optimizer=setup.optimizer),
        bits=setup.optimizer_bits,
        products=device.product_dtype,
    )
    undo = UpdateUndo(optimizer, device.memory())
    # An overflow would leave the update out, and with it what an optimiser allocates in its first.
    scaler = device.grad_scaler(first_scale=1.0)
    batches = partial(
        random_micro_batches,
        size,
        block_size=setup.shape.block_size,
        vocab_size=setup.shape.vocab_size,
        device=device,
    )
    if setup.compiled:
        compile_in_place(model, setup.activation_memory_budget)
    for _ in range(2):
        device.wait()
        started = time.monotonic()
        train_step(
            model,
            optimizer,
            scaler,
            batches(),
            device=device,
            ranks=Ranks(),
            lr=1e-5,
            grad_clip=1.0,
            seed=0,
        )
        undo.forget()
        device.wait()
        seconds = time.monotonic() - started
    evaluate(model, batches(), device=device, ranks=Ranks())
    return 2 * size * setup.shape.block_size / seconds


if __name__ == "__main__":
    _end_with_parent()
    print(_ANSWER + json.dumps(asdict(_answer(json.loads(sys.argv[1])))), flush=True)
