"""The cards there are: what their makers publish, and the one a person means by a name."""

import difflib
import re
from typing import NamedTuple

from nanofit.terminal import InputError


class Card(NamedTuple):
    """What a maker publishes about a card."""

    name: str  # as its driver reports it, without "NVIDIA"
    tensor_cores: int
    boost_mhz: int
    core_flops: int  # half precision with fp32 accumulation, per core and clock, dense
    memory_mib: int  # as the driver reports it where that is known, else the nominal size
    bandwidth_gb_s: int  # of its memory, in 10^9 bytes
    watts: int
    architecture: str

    @property
    def driver_name(self) -> str:
        """What its driver reports: cards that only a size tells apart have it in common."""
        return re.sub(r" \d+GB$", "", self.name)

    @property
    def peak_flops(self) -> float:
        return self.tensor_cores * self.boost_mhz * 1e6 * self.core_flops

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def has_bfloat16(self) -> bool:
        return self.architecture not in ("Volta", "Turing")

    @property
    def capability(self) -> tuple[int, int]:
        """What CUDA calls the features of its chip."""
        if self.architecture == "Ampere" and self.core_flops == 512:  # the A100's chip
            return 8, 0
        return _CAPABILITIES[self.architecture]


_CAPABILITIES = {
    "Volta": (7, 0),
    "Turing": (7, 5),
    "Ampere": (8, 6),
    "Ada": (8, 9),
    "Hopper": (9, 0),
    "Blackwell": (12, 0),
}


# NVIDIA's whitepapers and data sheets. Reference clocks: a factory-overclocked card runs a little
# faster. GeForce accumulates in fp32 at half the rate of the professional card with the same chip.
# Laptop clocks and watts are the highest allowed; most laptops stay below. A name that ends in a
# size tells cards apart whose drivers report the same name.
# fmt: off
CARDS = tuple(Card(*row) for row in (
    ("GeForce RTX 2060",                240, 1680,   64,   6144,  336,  160, "Turing"),
    ("GeForce RTX 2060 12GB",           272, 1650,   64,  12288,  336,  185, "Turing"),
    ("GeForce RTX 2060 SUPER",          272, 1650,   64,   8192,  448,  175, "Turing"),
    ("GeForce RTX 2070",                288, 1620,   64,   8192,  448,  175, "Turing"),
    ("GeForce RTX 2070 SUPER",          320, 1770,   64,   8192,  448,  215, "Turing"),
    ("GeForce RTX 2080",                368, 1710,   64,   8192,  448,  215, "Turing"),
    ("GeForce RTX 2080 SUPER",          384, 1815,   64,   8192,  496,  250, "Turing"),
    ("GeForce RTX 2080 Ti",             544, 1545,   64,  11264,  616,  250, "Turing"),
    ("GeForce RTX 3050",                 80, 1777,  128,   8192,  224,  130, "Ampere"),
    ("GeForce RTX 3050 6GB",             72, 1470,  128,   6144,  168,   70, "Ampere"),
    ("GeForce RTX 3060",                112, 1777,  128,  12288,  360,  170, "Ampere"),
    ("GeForce RTX 3060 8GB",            112, 1777,  128,   8192,  240,  170, "Ampere"),
    ("GeForce RTX 3060 Ti",             152, 1665,  128,   8192,  448,  200, "Ampere"),
    ("GeForce RTX 3070",                184, 1725,  128,   8192,  448,  220, "Ampere"),
    ("GeForce RTX 3070 Ti",             192, 1770,  128,   8192,  608,  290, "Ampere"),
    ("GeForce RTX 3080",                272, 1710,  128,  10240,  760,  320, "Ampere"),
    ("GeForce RTX 3080 12GB",           280, 1710,  128,  12288,  912,  350, "Ampere"),
    ("GeForce RTX 3080 Ti",             320, 1665,  128,  12288,  912,  350, "Ampere"),
    ("GeForce RTX 3090",                328, 1695,  128,  24576,  936,  350, "Ampere"),
    ("GeForce RTX 3090 Ti",             336, 1860,  128,  24564, 1008,  450, "Ampere"),
    ("GeForce RTX 4060",                 96, 2460,  128,   8188,  272,  115, "Ada"),
    ("GeForce RTX 4060 Ti",             136, 2535,  128,   8188,  288,  160, "Ada"),
    ("GeForce RTX 4060 Ti 16GB",        136, 2535,  128,  16380,  288,  165, "Ada"),
    ("GeForce RTX 4070",                184, 2475,  128,  12282,  504,  200, "Ada"),
    ("GeForce RTX 4070 SUPER",          224, 2475,  128,  12282,  504,  220, "Ada"),
    ("GeForce RTX 4070 Ti",             240, 2610,  128,  12282,  504,  285, "Ada"),
    ("GeForce RTX 4070 Ti SUPER",       264, 2610,  128,  16376,  672,  285, "Ada"),
    ("GeForce RTX 4080",                304, 2505,  128,  16376,  717,  320, "Ada"),
    ("GeForce RTX 4080 SUPER",          320, 2550,  128,  16376,  736,  320, "Ada"),
    ("GeForce RTX 4090 D",              456, 2520,  128,  24564, 1008,  425, "Ada"),
    ("GeForce RTX 4090",                512, 2520,  128,  24564, 1008,  450, "Ada"),
    ("GeForce RTX 5050",                 80, 2572,  128,   8192,  320,  130, "Blackwell"),
    ("GeForce RTX 5060",                120, 2497,  128,   8192,  448,  145, "Blackwell"),
    ("GeForce RTX 5060 Ti",             144, 2572,  128,   8192,  448,  180, "Blackwell"),
    ("GeForce RTX 5060 Ti 16GB",        144, 2572,  128,  16311,  448,  180, "Blackwell"),
    ("GeForce RTX 5070",                192, 2512,  128,  12227,  672,  250, "Blackwell"),
    ("GeForce RTX 5070 Ti",             280, 2452,  128,  16303,  896,  300, "Blackwell"),
    ("GeForce RTX 5080",                336, 2617,  128,  16303,  960,  360, "Blackwell"),
    ("GeForce RTX 5090",                680, 2407,  128,  32607, 1792,  575, "Blackwell"),

    ("GeForce RTX 3050 Laptop GPU",      64, 1740,  128,   4096,  192,   80, "Ampere"),
    ("GeForce RTX 3050 Ti Laptop GPU",   80, 1695,  128,   4096,  192,   80, "Ampere"),
    ("GeForce RTX 3060 Laptop GPU",     120, 1703,  128,   6144,  336,  115, "Ampere"),
    ("GeForce RTX 3070 Laptop GPU",     160, 1620,  128,   8192,  448,  125, "Ampere"),
    ("GeForce RTX 3070 Ti Laptop GPU",  184, 1485,  128,   8192,  448,  125, "Ampere"),
    ("GeForce RTX 3080 Laptop GPU",     192, 1710,  128,   8192,  448,  150, "Ampere"),
    ("GeForce RTX 3080 Ti Laptop GPU",  232, 1590,  128,  16384,  512,  150, "Ampere"),
    ("GeForce RTX 4050 Laptop GPU",      80, 2370,  128,   6141,  192,  115, "Ada"),
    ("GeForce RTX 4060 Laptop GPU",      96, 2370,  128,   8188,  256,  115, "Ada"),
    ("GeForce RTX 4070 Laptop GPU",     144, 2175,  128,   8188,  256,  115, "Ada"),
    ("GeForce RTX 4080 Laptop GPU",     232, 2280,  128,  12282,  432,  150, "Ada"),
    ("GeForce RTX 4090 Laptop GPU",     304, 2040,  128,  16376,  576,  150, "Ada"),

    ("TITAN RTX",                       576, 1770,  128,  24576,  672,  280, "Turing"),
    ("RTX A4000",                       192, 1560,  256,  16376,  448,  140, "Ampere"),
    ("RTX A5000",                       256, 1695,  256,  24564,  768,  230, "Ampere"),
    ("RTX A6000",                       336, 1800,  256,  49140,  768,  300, "Ampere"),
    ("RTX 4000 Ada Generation",         192, 2175,  256,  20475,  360,  130, "Ada"),
    ("RTX 5000 Ada Generation",         400, 2550,  256,  32760,  576,  250, "Ada"),
    ("RTX 6000 Ada Generation",         568, 2505,  256,  49140,  960,  300, "Ada"),

    ("Tesla T4",                        320, 1590,  128,  15360,  320,   70, "Turing"),
    ("Tesla V100-PCIE-16GB",            640, 1380,  128,  16384,  900,  250, "Volta"),
    ("Tesla V100-SXM2-16GB",            640, 1530,  128,  16384,  900,  300, "Volta"),
    ("Tesla V100-SXM2-32GB",            640, 1530,  128,  32768,  900,  300, "Volta"),
    ("A10",                             288, 1695,  256,  23028,  600,  150, "Ampere"),
    ("A30",                             224, 1440,  512,  24576,  933,  165, "Ampere"),
    ("A40",                             336, 1740,  256,  46068,  696,  300, "Ampere"),
    ("A100-PCIE-40GB",                  432, 1410,  512,  40960, 1555,  250, "Ampere"),
    ("A100-SXM4-40GB",                  432, 1410,  512,  40960, 1555,  400, "Ampere"),
    ("A100 80GB PCIe",                  432, 1410,  512,  81920, 1935,  300, "Ampere"),
    ("A100-SXM4-80GB",                  432, 1410,  512,  81920, 2039,  400, "Ampere"),
    ("L4",                              232, 2040,  256,  23034,  300,   72, "Ada"),
    ("L40",                             568, 2490,  128,  46068,  864,  300, "Ada"),
    ("L40S",                            568, 2520,  256,  46068,  864,  350, "Ada"),
    ("H100 PCIe",                       456, 1620, 1024,  81559, 2039,  350, "Hopper"),
    ("H100 80GB HBM3",                  528, 1830, 1024,  81559, 3352,  700, "Hopper"),
    ("H200",                            528, 1830, 1024, 143771, 4800,  700, "Hopper"),
))
# fmt: on


_MOST_OF_A_RUN = 100_000  # more is a slip


def check_gpus(gpus: int, *, shard: bool) -> None:
    """InputError unless a run can be forecast for so many cards."""
    if not 1 <= gpus <= _MOST_OF_A_RUN:
        raise InputError(f"--gpus {gpus} must be from 1 to {_MOST_OF_A_RUN}")
    if shard and gpus == 1:
        raise InputError("--shard cuts the model for several cards: give --gpus 2 or more")


def peak_flops(card: str, memory_mib: int | None = None) -> float | None:
    """Dense half-precision peak of a card by the name its driver reports; None if unknown."""
    known = known_card(card, memory_mib)
    return known and known.peak_flops


def known_card(name: str, memory_mib: int | None = None) -> Card | None:
    """The card of this name in the table or, of those whose drivers report it, nearest in memory.

    None if there is none; without a memory that of the name in the table.
    """
    name = name.removeprefix("NVIDIA ")
    if memory_mib is None:
        return next((card for card in CARDS if card.name == name), None)
    like = (card for card in CARDS if name in (card.name, card.driver_name))
    return min(like, key=lambda card: abs(card.memory_mib - memory_mib), default=None)


def find_card(typed: str) -> Card:
    """The card a person means: `RTX 4070`, `4070 super`, `3080 laptop`, `A100 80GB`."""
    wanted = _words(typed)
    found = [card for card in CARDS if wanted and wanted <= _words(card.name) | _sizes(card)]
    if not found:
        names = {" ".join(sorted(_words(card.name))): card.name for card in CARDS}
        key = " ".join(sorted(wanted))
        nearest = difflib.get_close_matches(key, names, n=4, cutoff=0.4)
        like = ", ".join(names[one] for one in nearest) or "RTX 4070, A100 80GB and 3080 laptop"
        raise InputError(f"card {typed!r} is not in the table; names like it are {like}")
    return min(found, key=lambda card: len(_words(card.name) - wanted))


def _words(name: str) -> set[str]:
    """What tells a card's name from others: `GeForce RTX 4070Ti` is {4070, ti}."""
    spaced = re.sub(r"(?<=\d)(?=(ti|super|laptop|d)\b)", " ", name.lower())
    return set(re.findall(r"\w+", spaced)) - {"nvidia", "geforce", "rtx", "gpu"}


def _sizes(card: Card) -> set[str]:
    """The sizes its memory may go by: error correction takes a sixteenth of the nominal one."""
    reported_gib = card.memory_mib / 1024
    return {f"{size}gb" for size in range(round(reported_gib), round(reported_gib * 16 / 15) + 1)}
