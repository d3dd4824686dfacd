"""What a machine is: published peaks for known cards, None for unknown ones, clear refusals."""

import re
import sys

import pytest
import torch

from nanofit.machine.cards import CARDS, find_card, known_card, peak_flops
from nanofit.machine.device import describe_device
from nanofit.machine.memory import is_out_of_memory
from nanofit.terminal import InputError
from tests import processes
from tests.conftest import PROJECT

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

# Dense half precision with fp32 accumulation, in TFLOPS, as NVIDIA's whitepapers and data sheets
# print it (or half of what they print with sparsity).
PUBLISHED = {
    "GeForce RTX 2080 Ti": 53.8,
    "TITAN RTX": 130.5,
    "GeForce RTX 3080": 59.5,
    "GeForce RTX 3090": 71.2,
    "GeForce RTX 4060": 30.2,
    "GeForce RTX 4060 Ti": 44.1,
    "GeForce RTX 4070": 58.3,
    "GeForce RTX 4070 SUPER": 71.0,
    "GeForce RTX 4070 Ti": 80.2,
    "GeForce RTX 4090": 165.2,
    "GeForce RTX 5070": 61.7,
    "GeForce RTX 5080": 112.6,
    "GeForce RTX 5090": 209.5,
    "Tesla T4": 65.1,
    "Tesla V100-SXM2-16GB": 125.3,
    "A10": 125.0,
    "A30": 165.2,
    "A40": 149.7,
    "RTX A6000": 154.8,
    "A100-SXM4-80GB": 311.9,
    "L4": 121.2,
    "L40": 181.0,
    "L40S": 366.4,
    "RTX 6000 Ada Generation": 364.2,
    "H100 PCIe": 756.4,
    "H100 80GB HBM3": 989.4,
}

# Width of the memory bus in bits, and gigabits per second of each of its wires.
MEMORY_BUS = {
    "GeForce RTX 2060": (192, 14),
    "GeForce RTX 2060 SUPER": (256, 14),
    "GeForce RTX 2080 SUPER": (256, 15.5),
    "GeForce RTX 2080 Ti": (352, 14),
    "GeForce RTX 3050": (128, 14),
    "GeForce RTX 3050 6GB": (96, 14),
    "GeForce RTX 3060": (192, 15),
    "GeForce RTX 3060 8GB": (128, 15),
    "GeForce RTX 3060 Ti": (256, 14),
    "GeForce RTX 3070 Ti": (256, 19),
    "GeForce RTX 3080": (320, 19),
    "GeForce RTX 3080 12GB": (384, 19),
    "GeForce RTX 3090": (384, 19.5),
    "GeForce RTX 3090 Ti": (384, 21),
    "GeForce RTX 4060": (128, 17),
    "GeForce RTX 4060 Ti": (128, 18),
    "GeForce RTX 4070": (192, 21),
    "GeForce RTX 4070 Ti SUPER": (256, 21),
    "GeForce RTX 4080": (256, 22.4),
    "GeForce RTX 4080 SUPER": (256, 23),
    "GeForce RTX 4090 D": (384, 21),
    "GeForce RTX 4090": (384, 21),
    "GeForce RTX 5050": (128, 20),
    "GeForce RTX 5060 Ti": (128, 28),
    "GeForce RTX 5070": (192, 28),
    "GeForce RTX 5070 Ti": (256, 28),
    "GeForce RTX 5080": (256, 30),
    "GeForce RTX 5090": (512, 28),
    "GeForce RTX 3050 Laptop GPU": (128, 12),
    "GeForce RTX 3060 Laptop GPU": (192, 14),
    "GeForce RTX 3080 Ti Laptop GPU": (256, 16),
    "GeForce RTX 4050 Laptop GPU": (96, 16),
    "GeForce RTX 4070 Laptop GPU": (128, 16),
    "GeForce RTX 4080 Laptop GPU": (192, 18),
    "GeForce RTX 4090 Laptop GPU": (256, 18),
    "TITAN RTX": (384, 14),
    "RTX A4000": (256, 14),
    "RTX A6000": (384, 16),
    "RTX 4000 Ada Generation": (160, 18),
    "RTX 5000 Ada Generation": (256, 18),
    "RTX 6000 Ada Generation": (384, 20),
    "Tesla T4": (256, 10),
    "Tesla V100-SXM2-16GB": (4096, 1.757),
    "A10": (384, 12.5),
    "A30": (3072, 2.43),
    "A40": (384, 14.5),
    "A100-SXM4-40GB": (5120, 2.43),
    "A100 80GB PCIe": (5120, 3.024),
    "A100-SXM4-80GB": (5120, 3.186),
    "L4": (192, 12.5),
    "L40S": (384, 18),
    "H100 PCIe": (5120, 3.186),
    "H100 80GB HBM3": (5120, 5.238),
    "H200": (6144, 6.25),
}


@pytest.mark.parametrize("card", PUBLISHED)
@pytest.mark.parametrize("maker", ["NVIDIA ", ""])
def test_peaks_of_known_cards_are_the_published_ones(card, maker):
    assert peak_flops(maker + card) / 1e12 == pytest.approx(PUBLISHED[card], abs=0.06)


@pytest.mark.parametrize("card", MEMORY_BUS)
def test_bandwidth_is_that_of_the_memory_bus(card):
    bits, gigabits_per_s = MEMORY_BUS[card]
    assert known_card(card).bandwidth_gb_s == pytest.approx(bits * gigabits_per_s / 8, rel=0.002)


@pytest.mark.parametrize("generation", ["20", "30", "40", "50"])
def test_a_dearer_card_of_a_generation_is_the_faster_one(generation):
    desktop = rf"GeForce RTX {generation}\d\d( D)?( Ti)?( SUPER)?"
    cards = [card for card in CARDS if re.fullmatch(desktop, card.name)]
    assert len(cards) >= 7
    peaks = [card.peak_flops for card in cards]
    assert peaks == sorted(peaks)


def test_each_card_is_told_once_with_sane_figures():
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert 4096 <= card.memory_mib <= 143771
        assert card.core_flops in (64, 128, 256, 512, 1024)
        assert 168 <= card.bandwidth_gb_s <= 4800
        assert 60 <= card.watts <= 700


def test_bfloat16_came_with_ampere():
    without = {card.name for card in CARDS if not card.has_bfloat16}
    assert {"GeForce RTX 2060", "Tesla T4", "Tesla V100-SXM2-16GB"} <= without
    assert not any(re.match(r"GeForce RTX [345]|A\d|[LH]\d", name) for name in without)


@pytest.mark.parametrize(
    ("card", "capability"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("GeForce RTX 2080 Ti", (7, 5)),
        ("A30", (8, 0)),
        ("A100-SXM4-80GB", (8, 0)),
        ("A10", (8, 6)),
        ("RTX A6000", (8, 6)),
        ("GeForce RTX 3050 Laptop GPU", (8, 6)),
        ("GeForce RTX 4070", (8, 9)),
        ("L40S", (8, 9)),
        ("H200", (9, 0)),
        ("GeForce RTX 5090", (12, 0)),
    ],
)
def test_capability_is_the_one_that_cuda_documents(card, capability):
    assert known_card(card).capability == capability
    assert known_card(card).has_bfloat16 == (capability >= (8, 0))


@pytest.mark.parametrize(
    ("reported", "memory_mib", "card"),
    [
        ("NVIDIA GeForce RTX 2060", 12288, "GeForce RTX 2060 12GB"),
        ("NVIDIA GeForce RTX 3050", 6144, "GeForce RTX 3050 6GB"),
        ("NVIDIA GeForce RTX 3060", 8191, "GeForce RTX 3060 8GB"),
        ("NVIDIA GeForce RTX 3060", 12045, "GeForce RTX 3060"),
        ("NVIDIA GeForce RTX 3080", 12053, "GeForce RTX 3080 12GB"),
        ("NVIDIA GeForce RTX 3080", 9995, "GeForce RTX 3080"),
        ("GeForce RTX 4060 Ti", 16380, "GeForce RTX 4060 Ti 16GB"),
        ("GeForce RTX 5060 Ti", 15848, "GeForce RTX 5060 Ti 16GB"),
        ("GeForce RTX 4070", 1500, "GeForce RTX 4070"),
        ("A100-SXM4-40GB", 40441, "A100-SXM4-40GB"),
    ],
)
def test_cards_that_share_a_drivers_name_are_told_apart_by_their_memory(reported, memory_mib, card):
    assert known_card(reported, memory_mib).name == card
    assert peak_flops(reported, memory_mib) == find_card(card).peak_flops


def test_each_card_is_known_by_its_name_and_its_drivers_with_its_memory():
    for card in CARDS:
        assert known_card(card.name, card.memory_mib) == card
        assert known_card(card.driver_name, card.memory_mib) == card


@pytest.mark.parametrize(
    ("typed", "card"),
    [
        ("RTX 4070", "GeForce RTX 4070"),
        ("4070", "GeForce RTX 4070"),
        ("NVIDIA GeForce RTX 4070", "GeForce RTX 4070"),
        ("rtx 4070 super", "GeForce RTX 4070 SUPER"),
        ("4070Ti Super", "GeForce RTX 4070 Ti SUPER"),
        ("4060 ti 16gb", "GeForce RTX 4060 Ti 16GB"),
        ("4060 ti 8gb", "GeForce RTX 4060 Ti"),
        ("3080 laptop", "GeForce RTX 3080 Laptop GPU"),
        ("A100 80GB", "A100 80GB PCIe"),
        ("a100 sxm4 80gb", "A100-SXM4-80GB"),
        ("V100 32GB", "Tesla V100-SXM2-32GB"),
        ("T4 16GB", "Tesla T4"),
        ("A10 24GB", "A10"),
    ],
)
def test_a_card_is_found_as_people_type_it(typed, card):
    assert find_card(typed).name == card


def test_each_card_is_found_by_its_own_name():
    assert [find_card(card.name) for card in CARDS] == list(CARDS)


@pytest.mark.parametrize(
    ("typed", "nearest"), [("RTX 4071", "GeForce RTX 4070"), ("H10", "H100"), ("", "RTX 4070")]
)
def test_an_unknown_card_is_refused_with_the_nearest_names(typed, nearest):
    with pytest.raises(InputError, match=f"not in the table; names like it are.*{nearest}"):
        find_card(typed)


@pytest.mark.parametrize(
    "card",
    [
        "",
        "CPU, 2 threads",
        "Apple GPU",
        "NVIDIA GeForce RTX 4070 Max-Q",
        "NVIDIA GeForce GTX 1080",
        "Quadro RTX 4000",
    ],
)
def test_the_peak_of_an_unknown_card_is_none(card):
    assert peak_flops(card) is None


@needs_no_cuda
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_without_cuda_is_refused_with_the_way_out(name):
    with pytest.raises(InputError, match="no CUDA device; use device = 'auto'"):
        describe_device(name)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_mps_without_mps_is_refused_with_the_way_out():
    with pytest.raises(InputError, match="use device = 'auto'"):
        describe_device("mps")


@needs_no_cuda
def test_auto_takes_what_there_is():
    assert describe_device("auto").type in ("mps", "cpu")


def test_the_cpu_has_neither_memory_nor_peak_to_tell():
    device = describe_device("cpu")
    assert (device.type, device.memory_bytes, device.peak_flops) == ("cpu", None, None)
    assert device.dtype is torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_under_autocast_have_the_asked_type(dtype):
    device = describe_device("cpu", dtype)
    matrix = torch.ones(2, 2)
    with device.autocast():
        assert (matrix @ matrix).dtype is getattr(torch, dtype)
    assert (matrix @ matrix).dtype is torch.float32


def test_only_float16_scales_the_loss():
    scaled = {
        dtype: describe_device("cpu", dtype).grad_scaler().is_enabled()
        for dtype in ("float32", "bfloat16", "float16")
    }
    assert scaled == {"float32": False, "bfloat16": False, "float16": True}


def test_sending_keeps_the_numbers():
    device = describe_device("cpu")
    tensor = torch.arange(6).view(2, 3)
    sent = device.send(device.stage(tensor))
    assert sent.device == device.torch_device
    assert torch.equal(sent, tensor)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_known_by_what_libraries_say(error, expected):
    assert is_out_of_memory(error) is expected


def test_memory_of_this_process_is_counted_as_linux_does():
    memory = describe_device("cpu").memory()
    started = memory.used_bytes()
    block = torch.ones(2**30, dtype=torch.uint8)  # more than any test before has left resident
    assert memory.peak_bytes() - started >= 0.5 * block.numel()
    assert memory.free_bytes() is None
    del block
    assert memory.vacated_bytes() >= 0.5 * 2**30
    memory.forget_peak()
    assert memory.vacated_bytes() < 0.1 * 2**30


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_limit_that_the_machine_does_not_allow_is_refused_in_a_line():
    hard_bytes = 2**40
    script = (
        "import resource; "
        f"resource.setrlimit(resource.RLIMIT_DATA, ({hard_bytes}, {hard_bytes})); "
        "from nanofit.machine.device import describe_device; "
        f"describe_device('cpu').memory().limit({hard_bytes} + 1)"
    )
    done = processes.run([sys.executable, "-c", script], cwd=PROJECT)
    assert f"InputError: memory_limit is {hard_bytes + 1}, but" in done.stderr


def test_number_that_is_peeked_at_is_the_one_it_was_then():
    number = torch.tensor(2.5)
    peek = describe_device("cpu").peek(number)
    number += 1
    assert peek.ready() and peek.value() == 2.5 != number.item()


def test_seed_gives_the_draws_that_torchs_own_does():
    device, seed = describe_device("cpu"), 2**64 - 1
    torch.manual_seed(seed)
    expected = torch.rand(8)
    device.seed(seed)
    assert torch.equal(torch.rand(8), expected)
