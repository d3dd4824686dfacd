"""In a child: what torch is, and which devices it sees.

python -m nanofit.doctor.look DEVICE DTYPE
"""

import sys
import warnings
from typing import Any

import torch

from nanofit.doctor.child import tell
from nanofit.machine.device import describe_device
from nanofit.machine.memory import available_bytes
from nanofit.terminal import InputError


def main(device: str, dtype: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        warning=str(caught[0].message) if caught else "",
        available_bytes=available_bytes(),
        cards=[_card(index) for index in range(count)],
    )
    try:
        chosen = describe_device(device, dtype)
    except InputError as error:
        tell(refusal=str(error))
        return
    tell(device=str(chosen.torch_device), name=chosen.name, note=chosen.note)
    if chosen.type == "cpu":
        _multiply_in_bfloat16()


def _card(index: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own page of text about a card it has no code for
        card = torch.cuda.get_device_properties(index)
    try:
        describe_device(f"cuda:{index}")
        refusal = ""
    except InputError as error:
        refusal = str(error)
    return {
        "name": card.name,
        "pci_bus": (card.pci_domain_id, card.pci_bus_id, card.pci_device_id),
        "total_bytes": card.total_memory,
        "capability": (card.major, card.minor),
        "refusal": refusal,
    }


def _multiply_in_bfloat16() -> None:
    """Where a virtual machine announces AMX without granting it, this is the process's end."""
    tell(multiplies=False)
    torch.ones(64, 64, dtype=torch.bfloat16).mm(torch.ones(64, 64, dtype=torch.bfloat16))
    tell(multiplies=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
