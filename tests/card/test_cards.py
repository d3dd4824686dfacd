"""Fits on cards of many sizes: as large as torch's allocator bears, and as forecast.

bench/cards.py does the same for all cards and configs; here are the kinds of card that differ.
"""

import pytest

from nanofit.fit.fit import MOST_RETRIES
from tests.card.harness import MIB

FIND = """
import gc, sys
from dataclasses import asdict, replace
from nanofit.settings.config import load_config
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.fit.fit import find_fit
from nanofit.memory.budget import usable_bytes
from nanofit.memory.setup import Setup
from nanofit.memory.need import need_of
from nanofit.fit.search import sizes_for
from nanofit.fit.trial import trial_here

def trial(*args, **kwargs):
    result = trial_here(*args, **kwargs)
    gc.collect()
    return replace(result, tokens_per_s=1.0)  # kernels that do nothing have no speed

settings = load_config(FLAGS)
shape, learn, run = settings
device = describe_device("cuda", run.dtype)
look = trial(Setup(shape), 0, device="cuda", limit_bytes=None)
fit = find_fit(settings, device, Ranks(), trial=trial)
setup = Setup(shape, dtype=device.precision, has_flash=device.has_flash,
    optimizer=learn.optimizer, **asdict(fit.savers))
larger = next(size for size in sizes_for(learn.sequences_per_step) if size > fit.eager.size)
tried = trial(setup, larger, device="cuda", limit_bytes=fit.limit_bytes)
forecast = need_of(setup).at(fit.eager.size) + look.held_bytes
reserve = look.free_bytes - usable_bytes(look.free_bytes, run)
tight = trial(setup, fit.eager.size, device="cuda", limit_bytes=forecast + reserve)
say(size=fit.eager.size, limit=fit.limit_bytes, reserved=fit.eager.peak_bytes,
    allocated=fit.eager.peak_allocated_bytes, forecast=forecast, dtype=device.precision,
    reserve=reserve, tight=tight.peak_bytes, retries=tight.retries,
    larger_fits=tried.peak_bytes is not None)
"""
SHAPE = (
    "--n_layer=2 --n_head=6 --n_embd=384 --block_size=1024 --compile=False --batch_size=12 "
    "--gradient_accumulation_steps=80"
).split()
LIMIT = "--memory_limit=1100MiB"


@pytest.mark.parametrize(
    ("name", "others", "dtype", "recipe"),
    [
        ("3050 laptop", 600, "float16", ""),
        ("RTX 2060", 0, "bfloat16", ""),  # which it has not
        ("RTX 4070", 2118, "bfloat16", ""),
        ("RTX 4070", 0, "bfloat16", "--arch=modern --optimizer=muon --bias=True"),
        ("RTX 2080 Ti", 0, "float16", "--arch=modern --optimizer=muon --bias=True"),
        ("RTX 5090", 600, "bfloat16", ""),
        ("RTX 4060", 0, "float32", ""),
        # Moments in 8 bits are in 32 for a while, of an embedding that is most of the model.
        ("RTX 4070", 0, "bfloat16", "--n_embd=768 --block_size=128 --optimizer_bits=8 " + LIMIT),
    ],
)
def test_fit_is_the_largest_the_allocator_bears(card, python, name, others, dtype, recipe):
    flags = [*SHAPE, f"--dtype={dtype}", *recipe.split()]
    code = f"FLAGS = {flags!r}\n" + FIND
    outcome, _ = python(code, on=card(name, others=others))
    seen = outcome[-1]
    assert not seen["larger_fits"]
    assert seen["reserved"] <= seen["limit"]
    # What is reserved beyond that was there to take: with no more room than this it is not needed.
    assert seen["tight"] is not None, seen
    assert seen["retries"] <= MOST_RETRIES, seen
    assert seen["forecast"] == pytest.approx(seen["allocated"], rel=0.01)
    assert seen["dtype"] == ("float16" if name == "RTX 2060" else dtype)


@pytest.mark.parametrize(("name", "total"), [("3050 laptop", 4096), ("RTX 4090", 24564)])
def test_classes_of_free_memory_cost_little(card, python, name, total):
    code = """
from nanofit.settings.config import load_config
from nanofit.machine.device import describe_device
from nanofit.fit.fit import _Fitter
from nanofit.memory.budget import usable_bytes
settings = load_config([])
device = describe_device("cuda")
limit_bytes, _ = _Fitter(settings, device, 480, print)._room()
say(limit=limit_bytes, usable=usable_bytes(device.memory().free_bytes(), settings.run))
"""
    (*_, seen), _ = python(code, on=card(name))
    assert 0 <= seen["usable"] - seen["limit"] <= 0.02 * total * MIB
