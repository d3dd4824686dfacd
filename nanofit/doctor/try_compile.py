"""In a child: compile a small function for a device, by all that torch.compile needs there.

python -m nanofit.doctor.try_compile DEVICE
"""

import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from nanofit.doctor.child import tell
from nanofit.machine.device import describe_device
from nanofit.terminal import InputError, first_line

TOLERANCE = 1e-3


def main(name: str) -> None:
    try:
        device = describe_device(name)
    except InputError:  # of which `look` tells
        tell(seconds=None)
        return
    numbers = torch.linspace(-2, 2, 1024, device=device.torch_device)
    started = time.monotonic()
    try:
        found = torch.compile(_compute, dynamic=False)(numbers).item()
    except Exception as error:  # what is wrong with a compiler comes in every form
        cause = getattr(error, "inner_exception", None) or error
        tell(failed=f"{type(cause).__name__}: {first_line(cause)}")
        return
    expected = _compute(numbers).item()
    if abs(found - expected) > TOLERANCE * abs(expected):
        tell(failed=f"it computes {found:.6g} where {expected:.6g} is right")
    else:
        tell(seconds=time.monotonic() - started)


def _compute(numbers: Tensor) -> Tensor:
    return F.gelu(numbers).sum()


if __name__ == "__main__":
    main(*sys.argv[1:])
