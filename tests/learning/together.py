"""Steps that several processes do together; each tells in a file what came of them.

Run by `processes.run_ranks`: `together.py FOLDER SCENARIO...`.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning import engine as engines
from nanofit.learning.engine import engine_for
from nanofit.learning.optim import build_optimizer
from nanofit.learning.sharded import Shards
from nanofit.learning.step import evaluate, train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks, start_ranks
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import run_script

# Of 6 MiB, so that there are two buckets: the first ends after 1.
SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=256, block_size=8, vocab_size=256, bias=True)
LEARN = TrainConfig()
SEQUENCES, STEPS = 12, 4


class Run:
    """A few steps of a small model, of which each process does its part."""

    def __init__(
        self, ranks: Ranks, dtype: str = "float32", recompute: str = "off", shard: bool = False
    ):
        torch.manual_seed(3)
        self.ranks = replace(ranks, holds_part=shard)
        self.engine = Shards(self.ranks) if shard else engine_for(ranks)
        self.device = describe_device("cpu", dtype)
        self.model = GPT(SHAPE, recompute=recompute)
        self.engine.hold(self.model, self.device)
        self.optimizer = build_optimizer(self.model, LEARN, ranks=ranks)
        self.engine.follow(self.optimizer)
        self.scaler = self.device.grad_scaler()

    def step(self, step: int) -> tuple[float, float]:
        loss, norm = train_step(
            self.model,
            self.optimizer,
            self.scaler,
            self._micro_batches(step),
            device=self.device,
            ranks=self.ranks,
            lr=1e-3,
            grad_clip=1.0,
            seed=step,
            engine=self.engine,
        )
        return loss.item(), norm.item()

    def steps(self) -> dict:
        told = [self.step(step) for step in range(STEPS)]
        return {"told": told, "weights": self.engine.gathered(self.model.state_dict())}

    def give_up(self) -> None:
        """As a run does before it tries a step again."""
        self.model.zero_grad(set_to_none=True)
        self.engine.forget()

    def _micro_batches(self, step: int):
        """Two, of what is this process's part."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (SEQUENCES, 9), generator=generator)
        share = SEQUENCES // self.ranks.world
        mine = tokens[self.ranks.rank * share : (self.ranks.rank + 1) * share]
        for rows in mine.chunk(2):
            yield MicroBatch(rows[:, :-1], rows[:, 1:], len(rows) / SEQUENCES)


def undisturbed(ranks: Ranks) -> dict:
    return Run(ranks).steps()


def in_parts(ranks: Ranks) -> dict:
    return Run(ranks, shard=True).steps()


def in_parts_scaled(ranks: Ranks) -> dict:
    return Run(ranks, shard=True, dtype="float16").steps()


def in_parts_recomputed(ranks: Ranks) -> dict:
    return Run(ranks, shard=True, recompute="block").steps()


def held(ranks: Ranks) -> dict:
    """How many numbers a process has of weights, gradients and moments, and of how many."""
    run, noted = Run(ranks, shard=True), []
    run.optimizer.register_step_pre_hook(
        lambda *_: noted.append([p.grad.to_local().numel() for p in run.model.parameters()])
    )
    run.step(0)
    parts = [p.to_local().numel() for p in run.model.parameters()]
    moments = [s["exp_avg"].to_local().numel() for s in run.optimizer.state.values()]
    whole = sum(p.numel() for p in run.model.parameters())
    return {"held": [sum(parts), sum(noted[0]), sum(moments)], "whole": whole}


def evaluated(ranks: Ranks) -> dict:
    """The mean loss of one sequence, which leaves all but one process without any."""
    run = Run(ranks, shard=True)
    mine = run._micro_batches(0) if ranks.is_main else []
    batches = [MicroBatch(idx, targets, 0.5) for idx, targets, _ in mine]
    loss = evaluate(run.model, run.engine.evenly(batches), device=run.device, ranks=run.ranks)
    return {"loss": loss}


def saved_and_loaded(ranks: Ranks) -> dict:
    """Two steps in parts, gathered and put into a new beginning, and two more."""
    first, second = Run(ranks, shard=True), Run(ranks, shard=True)
    told = [first.step(0), first.step(1)]
    learned = (first.model.state_dict(), first.optimizer.state_dict())
    content = first.engine.gathered(dict(zip(("model", "optimizer"), learned, strict=True)))
    sent = [content]
    dist.broadcast_object_list(sent)  # as all would read it from a file
    second.model.load_state_dict(sent[0]["model"])
    second.optimizer.load_state_dict(sent[0]["optimizer"])
    return {"told": [*told, second.step(2), second.step(3)]}


def part_failed(ranks: Ranks) -> dict:
    """One process runs out of memory in mid-pass."""
    run = Run(ranks, shard=True)

    def fail(*_) -> None:
        if ranks.rank == ranks.world - 1:
            raise torch.OutOfMemoryError("no room")

    run.model.transformer.h[0].register_forward_hook(fail)
    run.step(0)
    return {}


def scaled(ranks: Ranks) -> dict:
    return Run(ranks, dtype="float16").steps()


def recomputed(ranks: Ranks) -> dict:
    return Run(ranks, recompute="block").steps()


def failed(ranks: Ranks) -> dict:
    """The last process fails once, in each step by turns, and all try again."""
    results = {}
    for where, (module, passes, is_backward) in PLACES.items():
        for bad_step in range(3):
            run = Run(ranks)
            told, errors = [], []
            for step in range(STEPS):
                if step == bad_step:
                    block = run.model.transformer.h[module]
                    fails = ranks.rank == ranks.world - 1
                    errors.append(_failure(run, block, step, passes, is_backward, fails))
                told.append(run.step(step))
            name = f"{where}, step {bad_step}"
            results[name] = {"told": told, "weights": run.model.state_dict(), "errors": errors}
    return results


# Of the model's two blocks and the two passes of a step: which, and whether on the way back. When
# the first block's turn comes, the first bucket is on its way, if there is more than one.
PLACES = {
    "first pass": (0, 0, False),
    "last pass": (1, 1, False),
    "way back of the first pass": (0, 0, True),
    "way back of the last pass": (1, 1, True),
    "end of the way back of the last pass": (0, 1, True),
}


def _failure(
    run: Run, block: nn.Module, step: int, passes: int, is_backward: bool, fails: bool
) -> str:
    calls = []

    def fail(*_) -> None:
        calls.append(None)
        if fails and len(calls) == passes + 1:
            raise torch.OutOfMemoryError("no room")

    hook = (block.register_full_backward_pre_hook if is_backward else block.register_forward_hook)(
        fail
    )
    try:
        run.step(step)
    except Exception as error:
        told = type(error).__name__
    hook.remove()
    run.give_up()
    return told


def ordered(ranks: Ranks) -> dict:
    """What happens when: sums of buckets, and the way back through the first block."""
    run, happened, own = Run(ranks), [], engines._sum

    def noted(state, bucket):
        happened.append(("sum", bucket.index(), bucket.is_last()))
        return own(state, bucket)

    engines._sum = noted
    run.model.transformer.h[0].register_full_backward_pre_hook(
        lambda *_: happened.append(("back", 0, False))
    )
    steps, buffers = [], []
    for step in range(STEPS):
        happened.clear()
        run.step(step)
        steps.append(list(happened))
        storages = {g.untyped_storage().data_ptr(): g.untyped_storage() for g in _gradients(run)}
        buffers.append(sum(storage.nbytes() for storage in storages.values()))
    engines._sum = own
    parameter_bytes = sum(p.nbytes for p in run.model.parameters())
    return {"happened": steps, "buffers": buffers, "parameter_bytes": parameter_bytes}


def _gradients(run: Run) -> list[torch.Tensor]:
    return run.engine._gradients


def lost(ranks: Ranks) -> dict:
    """The last process dies on the way back of its second step's last pass."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there is something left to say
    run = Run(ranks)
    run.step(0)
    calls = []

    def die(*_) -> None:
        calls.append(None)
        if ranks.rank == ranks.world - 1 and len(calls) == 2:
            os._exit(1)

    run.model.transformer.h[0].register_full_backward_pre_hook(die)
    run.step(1)
    return {}


SCENARIOS: dict[str, Callable[[Ranks], dict]] = {
    one.__name__: one
    for one in (
        *(undisturbed, scaled, recomputed, failed, ordered, lost),
        *(in_parts, in_parts_scaled, in_parts_recomputed),
        *(held, evaluated, saved_and_loaded, part_failed),
    )
}


def main(argv: list[str]) -> None:
    folder, *names = argv
    with start_ranks("gloo") as ranks:
        results = {name: SCENARIOS[name](ranks) for name in names}
        torch.save(results, Path(folder) / f"{ranks.world}-{ranks.rank}.pt")


if __name__ == "__main__":
    run_script(main)
