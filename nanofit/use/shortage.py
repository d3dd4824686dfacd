"""What to do when memory runs out: the same in smaller pieces, or tell it in a line."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from nanofit.machine.device import Device
from nanofit.machine.memory import is_out_of_memory
from nanofit.terminal import InputError

T = TypeVar("T")


def if_it_fits(attempt: Callable[[], T], device: Device, *, is_smallest: bool) -> T | None:
    """What comes of an attempt; None if memory runs out and it can be made smaller."""
    try:
        return attempt()
    except Exception as error:
        if is_smallest or not is_out_of_memory(error):
            raise
    gc.collect()  # not before the error, and what it holds on to, is gone
    device.memory().release()
    return None


@contextmanager
def shortage_in_one_line(device: Device, way_out: str) -> Iterator[None]:
    """Tell a person, who alone can do something about it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory on {device.name}; end what else uses it, or {way_out}"
        ) from error
