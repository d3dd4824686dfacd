"""What a run is, for programs: its settings, machine and data, and what is expected of it.

Each launch begins with it, so that metrics.jsonl alone tells all that a report needs.
"""

import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanofit.memory.need import components_of
from nanofit.memory.setup import Setup
from nanofit.settings.config import ENDLESS, flatten
from nanofit.terminal import redacted

if TYPE_CHECKING:
    from nanofit.run.launch import Launch


def described(launch: "Launch") -> dict[str, Any]:
    """A launch in plain values; what is not known is None."""
    shape = launch.learner.model.config
    return {
        "time": time.time(),
        "command": redacted(shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])),
        "settings": flatten(shape, launch.learn, launch.run),
        "parameters": shape.parameters,
        "data": _data(launch),
        "machine": _machine(launch),
        "plan": _plan(launch),
        "memory": _memory(launch),
    }


def _data(launch: "Launch") -> dict[str, Any]:
    train, val = launch.train_data, launch.val_data
    return {
        "folder": str(launch.run.data_dir),
        "train_tokens": len(train.bins),
        "val_tokens": len(val.bins),
        "val_sequences": val.sequences,
        "val_bytes_per_token": val.bins.bytes_per_token,
    }


def _machine(launch: "Launch") -> dict[str, Any]:
    device = launch.device
    memory = {"memory_bytes": device.memory_bytes, "peak_flops": device.peak_flops}
    return {**launch.machine, **memory}


def _plan(launch: "Launch") -> dict[str, Any]:
    """What is expected of the whole run; its length is not known yet if it is given in hours."""
    forecast, band = launch.forecast, launch.forecast.band
    has_length = launch.learn.max_iters != ENDLESS
    return {
        "steps": launch.learn.max_iters if has_length else None,
        "seconds": forecast.seconds if has_length else 3600 * launch.learn.hours,
        "tokens_per_s": forecast.tokens_per_s,
        "loss_low": band and band.low,
        "loss_high": band and band.high,
    }


def _memory(launch: "Launch") -> dict[str, Any]:
    """The forecast of each stage's peak, without what libraries and the context take."""
    fit = launch.fit
    stages = {"eager": fit.eager, "compiled": fit.compiled}
    told = {}
    for name, stage in stages.items():
        if stage is None:
            continue
        setup = Setup(
            launch.learner.model.config,
            dtype=launch.device.precision,
            compiled=name == "compiled",
            loss=launch.run.loss,
            optimizer=launch.learn.optimizer,
            has_flash=launch.device.has_flash,
            world=launch.ranks.world,
            shard=launch.run.shard and launch.ranks.world > 1,
            **asdict(fit.savers),
        )
        components = components_of(setup, stage.size)
        told[name] = {"micro_batch": stage.size, "components": components}
    return {"limit_bytes": fit.limit_bytes, "stages": told}
