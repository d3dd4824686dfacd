"""A bit that flips anywhere in a checkpoint: it is noticed, or it makes no difference."""

import random

import pytest
import torch

from nanofit.run.checkpoint import Checkpoints
from nanofit.settings.config import TrainConfig, flatten
from nanofit.settings.shape import GPTConfig
from tests.disturb import flip_a_bit

FLIPS = 150


def content(step: int) -> dict:
    return {
        "model": {"weight": torch.full((8, 8), float(step))},
        "model_args": {},
        "optimizer": {"state": {}},
        "config": flatten(GPTConfig(), TrainConfig()) | {"out_dir": "out"},
        "iter_num": step,
    }


@pytest.fixture
def checkpoints(tmp_path):
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save(content(step))
    return kept


def test_any_flipped_bit_leads_to_the_same_content_or_to_the_checkpoint_before(checkpoints):
    """Most of so small a file is zip's headers, of which a reader trusts every word."""
    newest, chance = checkpoints.newest_first()[0], random.Random(1)
    whole, loaded = newest.read_bytes(), []
    for bit in chance.sample(range(8 * len(whole)), FLIPS):
        flip_a_bit(newest, bit)
        told = []
        found = checkpoints.load(GPTConfig(), TrainConfig(), told.append)
        step = found["iter_num"]
        assert str(found) == str(content(step)), f"bit {bit}"
        assert bool(told) == (step == 1) and all(str(newest) in line for line in told)
        loaded.append(step)
        newest.write_bytes(whole)
    assert set(loaded) == {1, 2}
