"""What a machine is: published peaks for known cards, None for unknown ones, clear refusals."""

from types import SimpleNamespace

import pytest
import torch

from nanofit.device import describe_device, peak_flops
from nanofit.terminal import InputError

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

# Dense half precision with fp32 accumulation, from NVIDIA's Ada and Ampere whitepapers, in TFLOPS.
PUBLISHED = {
    "4060": 30.2,
    "4060 Ti": 44.1,
    "4070": 58.3,
    "4070 SUPER": 71.0,
    "4070 Ti": 80.2,
    "4090": 165.2,
}


@pytest.fixture(autouse=True)
def keep_determinism():
    """Describing the CPU switches deterministic algorithms on for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.mark.parametrize("card", PUBLISHED)
@pytest.mark.parametrize("maker", ["NVIDIA GeForce RTX ", "GeForce RTX "])
def test_peaks_of_known_cards_are_the_published_ones(card, maker):
    assert peak_flops(maker + card) / 1e12 == pytest.approx(PUBLISHED[card], abs=0.05)


def test_the_larger_card_of_a_generation_is_the_faster_one():
    names = "4060|4060 Ti|4070|4070 SUPER|4070 Ti|4070 Ti SUPER|4080|4080 SUPER|4090".split("|")
    peaks = [peak_flops(f"NVIDIA GeForce RTX {name}") for name in names]
    assert peaks == sorted(peaks)
    names = "3060|3060 Ti|3070|3080|3090".split("|")
    peaks = [peak_flops(f"NVIDIA GeForce RTX {name}") for name in names]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(
    "card",
    [
        "",
        "CPU, 2 threads",
        "Apple GPU",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GeForce RTX 4070 Laptop GPU",
        "NVIDIA GeForce RTX 5070",
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


def test_cuda_card_is_described_by_its_driver(monkeypatch):
    """torch's own answers are stood in for, so that these lines run on a machine without a card."""
    card = SimpleNamespace(name="NVIDIA GeForce RTX 4070", total_memory=12_878_610_432)
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    device = describe_device("auto", local_rank=1)
    assert chosen == [1]
    assert device.torch_device == torch.device("cuda", 1)
    assert (device.dtype, device.memory_bytes) == (torch.bfloat16, card.total_memory)
    assert device.peak_flops == pytest.approx(58.3e12, rel=1e-3)
    assert describe_device("cuda:0", "float16").dtype is torch.float16
    with pytest.raises(InputError, match="no device cuda:2: this machine has 2"):
        describe_device("cuda:2")
