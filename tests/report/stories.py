"""Records of runs that never were, for what reads them."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_PER_STEP, STEP_S = 1000, 2.0
GIB = 2**30
BYTES_PER_TOKEN = 4.0
COMPONENTS = {"weights": GIB, "gradients": GIB, "optimiser state": 2 * GIB, "activations": 3 * GIB}

Record = dict[str, Any]


def record(kind: str, steps_done: int, **values: Any) -> Record:
    place = {"tokens": TOKENS_PER_STEP * steps_done, "seconds": STEP_S * steps_done}
    return {"kind": kind, "step": steps_done, **place, **values}


def launch(step: int = 0, *, steps: int = 100, **parts: dict[str, Any]) -> Record:
    """What a launch on a card begins with; `parts` are changes, as in data={"folder": "other"}."""
    stages = {
        "eager": {"micro_batch": 4, "components": COMPONENTS},
        "compiled": {"micro_batch": 8, "components": COMPONENTS | {"activations": 5 * GIB}},
    }
    values = {
        "settings": {"n_layer": 2, "learning_rate": 1e-3, "out_dir": "out"},
        "data": {"folder": "data/some", "train_tokens": 10**6, "val_tokens": 10**4},
        "machine": {"device": "NVIDIA RTX 4070", "precision": "bfloat16", "memory_bytes": 12 * GIB},
        "plan": {
            "steps": steps,
            "seconds": 160.0,
            "tokens_per_s": 400.0,
            "loss_low": 2.0,
            "loss_high": 2.2,
        },
        "memory": {"limit_bytes": 10 * GIB, "stages": stages},
    }
    changed = {name: value | parts.get(name, {}) for name, value in values.items()}
    more = {"time": 1.7e9, "command": "python train.py config/some.py", "parameters": 124_000_000}
    return record("run", step, **more, **changed)


def step(number: int, loss: float | None, **values: Any) -> Record:
    place = record("step", number + 1) | {"step": number}
    common = {"lr": 1e-3, "grad_norm": 0.5, "tokens_per_s": TOKENS_PER_STEP / STEP_S, "mfu": 0.4}
    return place | {"loss": loss} | common | values


def evaluation(number: int, val_loss: float | None, **values: Any) -> Record:
    bits = val_loss and val_loss / math.log(2) / BYTES_PER_TOKEN
    return record("eval", number, val_loss=val_loss, bits_per_byte=bits, **values)


def event(number: int, name: str, **details: Any) -> Record:
    return record("event", number, name=name, **details)


def stage(number: int, now: str, micro_batch: int, reason: str = "the run begins") -> Record:
    passes = 16 // micro_batch
    return event(number, "stage", now=now, micro_batch=micro_batch, passes=passes, reason=reason)


def measured(number: int, now: str, micro_batch: int, peak_mib: int) -> Record:
    state = {"now": now, "micro_batch": micro_batch, "passes": 16 // micro_batch}
    return event(number, "stage measured", **state, tokens_per_s=500, peak_mib=peak_mib)


def sample(number: int, text: str, prompt: str = "Once") -> Record:
    return record("sample", number, prompt=prompt, text=text)


def losses(count: int, seed: int = 0) -> list[float]:
    """A noisy curve from 11 down to 2, with a spike in the middle."""
    noise = np.random.default_rng(seed).normal(0, 0.05, count)
    curve = 2 + 9 * np.exp(-np.arange(count) / (count / 12)) + noise
    curve[count // 2] += 3
    return curve.tolist()


def band(number: int) -> dict[str, float]:
    return {"expected_low": 1.9 + 10 / (number + 5), "expected_high": 2.3 + 20 / (number + 5)}


def whole_run(count: int = 100, seed: int = 0) -> list[Record]:
    """A run with all that can happen to one, finished."""
    records = [launch(steps=count), event(0, "started", micro_batch=4), stage(0, "eager", 4)]
    for number, loss in enumerate(losses(count, seed)):
        if number == 10:
            records.append(measured(number, "eager", 4, 7 * 1024 + 512))
            records.append(stage(number, "compiled", 8, "compiled in 9 s"))
        elif number == 20:
            records.append(stage(number, "compiled", 4, "out of memory"))
        elif number == count // 2:
            records.append(event(number, "spikes skipped", updates=1))
        elif number == count - 25:
            records.append(launch(number, steps=count, data={"folder": "data/other"}))
            records.append(event(number, "resumed", micro_batch=4))
        records.append(step(number, loss, **band(number)))
        if (number + 1) % (count // 5) == 0:
            records.append(evaluation(number + 1, loss + 0.01, **band(number)))
            records.append(sample(number + 1, f" upon a time, at step {number + 1}."))
    return [*records, event(count, "finished")]


def write(folder: Path, records: Iterable[Record | str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
