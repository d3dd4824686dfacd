"""The simulator against published figures, torch's own tracker and real allocations."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks
from nanofit.machine.overhead import CUDA_CONTEXT_BYTES
from nanofit.memory import simulate as module
from nanofit.memory.allocator import LARGE_SEGMENT, OutOfMemory
from nanofit.memory.course import Curve
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import Hull, simulated_need
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig
from tests.memory.simulations import (
    GPT2_77M,
    GPT2_124M,
    TINY,
    nanogpts_way,
    passes_begun,
    peak_index,
    simulate,
    simulate_anew,
)

GIB, MIB = 2**30, 2**20
SMALL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=256, vocab_size=5000)
CUBLAS_BYTES = 2 * 8320 * 1024  # its workspace on these cards, which torch's allocator counts
GPT2_6_384 = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=512)
LOGITS_BYTES = 16 * 1024 * 50304 * 2


@pytest.mark.parametrize(
    ("changes", "low_gib", "high_gib"),
    [
        (
            {"compiled": True, "loss": "full"},
            (0.95 * 6.75, 0.95 * 8.84),
            (1.05 * 6.75, 1.05 * 8.84),
        ),
        (
            {"compiled": True, "loss": "full", "activation_memory_budget": 0.5},
            (0.95 * 5.41, 0.95 * 7.10),
            (1.05 * 5.41, 1.05 * 7.10),
        ),
        ({}, (5.5, 7.7), (5.8, 7.9)),
        ({"compiled": True}, (0.95 * 5.5, 0.95 * 7.7), (5.8, 7.9)),
    ],
    ids=[
        "loss only, compiled",
        "loss only, compiled, half the activations",
        "chunked, eager",
        "chunked, compiled",
    ],
)
@pytest.mark.parametrize("model", [0, 1], ids=["77M", "124M"])
def test_peak_of_16_sequences_is_the_published_one(changes, low_gib, high_gib, model):
    setup = Setup((GPT2_77M, GPT2_124M)[model], **changes)
    assert low_gib[model] <= simulate(setup, 16).peak_bytes / GIB <= high_gib[model]


# nanoGPT's own model.py (of November 2025) in its own step, on torch's allocator: 2 steps of 2
# micro-batches with the CUDA build of torch 2.13, capability 8.9, expandable segments and fused
# AdamW. max_memory_allocated() and max_memory_reserved() at the end, cuBLAS' 16 MiB included.
@pytest.mark.parametrize(
    ("shape", "changes", "micro_batch_size", "allocated_bytes", "reserved_bytes"),
    [
        (GPT2_77M, {}, 16, 15_445_202_432, 18_247_319_552),
        (GPT2_77M, {"compiled": True}, 16, 10_501_035_520, 11_618_222_080),
        (GPT2_124M, {}, 8, 9_961_577_984, 11_521_753_088),
        (GPT2_124M, {"compiled": True}, 8, 7_491_460_608, 8_208_252_928),
        (
            replace(GPT2_6_384, dropout=0.1),
            {"dtype": "float16"},
            16,
            6_245_727_232,
            7_725_907_968,
        ),
        (GPT2_6_384, {"dtype": "float16", "compiled": True}, 16, 3_732_749_312, 4_370_464_768),
    ],
    ids=[
        "77M, eager",
        "77M, compiled",
        "124M, eager",
        "124M, compiled",
        "6/6/384, eager, float16, dropout",
        "6/6/384, compiled, float16",
    ],
)
def test_nanogpts_way_takes_what_nanogpt_took_on_torchs_allocator(
    shape, changes, micro_batch_size, allocated_bytes, reserved_bytes
):
    simulation = simulate(nanogpts_way(shape, **changes), micro_batch_size)
    assert simulation.peak_bytes == pytest.approx(allocated_bytes, rel=0.01)
    reserved = simulation.replay(expandable_segments=True).peak_reserved_bytes
    assert reserved == pytest.approx(reserved_bytes, rel=0.01)


# Our own step in the same way: 2 layers, vocabulary 2048, eager. Without flash attention on
# capability 7.5, else on 8.9; heads of 50 are padded.
@pytest.mark.parametrize(
    ("n_embd", "changes", "allocated_bytes"),
    [
        (384, {"dtype": "float16", "has_flash": False}, 375_440_896),
        (384, {}, 375_441_408),
        (384, {"dtype": "float32"}, 564_576_256),
        (400, {}, 412_559_360),
    ],
    ids=["efficient, float16", "flash", "efficient, float32", "flash, padded"],
)
def test_our_step_takes_what_it_took_on_torchs_allocator(n_embd, changes, allocated_bytes):
    shape = GPTConfig(n_layer=2, n_head=8, n_embd=n_embd, block_size=1024, vocab_size=2048)
    simulated = simulate(Setup(shape, **changes), 8).peak_bytes
    assert simulated == pytest.approx(allocated_bytes - CUBLAS_BYTES, rel=0.003)


@pytest.mark.parametrize(
    ("kernels", "changes"),
    [
        ("flash", {}),
        ("flash", {"dtype": "float16"}),
        ("efficient", {"dtype": "float32"}),
        ("efficient", {"dtype": "float16", "has_flash": False}),
        ("math", {"has_flash": False}),
        ("math", {"dtype": "float16", "has_flash": False, "shape": GPTConfig(n_embd=12 * 50)}),
        ("flash", {"shape": GPTConfig(n_embd=12 * 50)}),
    ],
)
def test_attention_is_done_by_the_kernels_torch_took_on_a_card(kernels, changes):
    assert replace(Setup(GPT2_77M), **changes).attention == kernels


def test_process_of_a_real_run_on_a_4070_is_as_large_as_nvidia_smi_said():
    setup = nanogpts_way(GPT2_6_384, dtype="float16", compiled=True)
    reserved = simulate(setup, 16).replay(expandable_segments=False).peak_reserved_bytes
    assert (reserved + CUDA_CONTEXT_BYTES) / MIB == pytest.approx(4464, rel=0.05)


def test_full_logits_are_alive_at_the_peak_of_nanogpts_way_and_never_under_ours():
    of_nanogpt = simulate(nanogpts_way(GPT2_77M, compiled=True), 16)
    assert sum(buffer.size_bytes == LOGITS_BYTES for buffer in of_nanogpt.alive_at_peak) >= 3
    for compiled in (False, True):
        ours = simulate(Setup(GPT2_77M, compiled=compiled), 16)
        assert max(event.buffer.size_bytes for event in ours.events) < LOGITS_BYTES / 4


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_torchs_own_memory_tracker_counts_the_same_peak(loss):
    device = Device(torch.device("cpu"), "fake", torch.bfloat16, None, None)
    tracker = MemTracker()

    def batches():
        for batch in _batches(SMALL, 8):
            tracker.reset_mod_stats()
            yield batch

    with FakeTensorMode():
        model = GPT(SMALL, loss=loss)
        optimizer = build_optimizer(model, TrainConfig())
        tracker.track_external(model, optimizer)
        with tracker:
            _two_steps(model, optimizer, device, batches)
    tracked = max(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())
    assert simulate(Setup(SMALL, loss=loss), 8).peak_bytes == pytest.approx(tracked, rel=0.005)


@pytest.mark.usefixtures("_no_garbage")
@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_real_model_allocates_as_much_on_a_cpu(loss):
    device = Device(torch.device("cpu"), "CPU", torch.float32, None, None)
    with torch.profiler.profile(profile_memory=True) as profile:
        model = GPT(SMALL, loss=loss)
        optimizer = build_optimizer(model, TrainConfig())
        _two_steps(model, optimizer, device, lambda: _batches(SMALL, 8))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = measured = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        measured = max(measured, allocated)
    simulated = simulate(Setup(SMALL, loss=loss, dtype="float32"), 8).peak_bytes
    assert simulated == pytest.approx(measured, rel=0.05)


def _two_steps(model, optimizer, device, batches) -> None:
    for _ in range(2):
        arguments = dict(device=device, ranks=Ranks(), lr=1e-3, grad_clip=1.0, seed=0)
        train_step(model, optimizer, device.grad_scaler(), batches(), **arguments)


def _batches(shape, size):
    for _ in range(2):
        tokens = torch.zeros(size, shape.block_size + 1, dtype=torch.int64)
        yield MicroBatch(tokens[:, :-1], tokens[:, 1:], 0.5)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_peak_is_a_straight_line_over_the_micro_batch(compiled):
    setup = Setup(SMALL, compiled=compiled)
    few, some, many = (simulate(setup, size).peak_bytes for size in (8, 17, 40))
    assert some == pytest.approx(few + (many - few) * (17 - 8) / (40 - 8), rel=1e-3)


@pytest.mark.parametrize(("size", "tolerance"), [(1, 0.02), (13, 1e-5), (200, 1e-5)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "full"},
        {"recompute": "selective"},
        {"recompute": "alternate"},
        {"recompute": "block"},
        {"compiled": True},
        {"compiled": True, "activation_memory_budget": 0.7},
    ],
    ids=str,
)
def test_need_of_any_size_is_that_of_its_simulation(changes, size, tolerance):
    setup = Setup(replace(SMALL, n_layer=2), **changes)
    simulated = simulate(setup, size).peak_bytes
    assert _need_of(setup).at(size) == pytest.approx(simulated, rel=tolerance)


_need_of = cache(simulated_need)


def test_loss_in_all_its_chunks_takes_what_its_first_ones_take(monkeypatch):
    setup = Setup(SMALL)
    expected = simulate_anew(setup, 16).peak_bytes
    monkeypatch.setattr(module, "CHUNKS", None)
    assert simulate_anew(setup, 16).peak_bytes == expected


def test_largest_micro_batch_is_the_last_one_under_the_limit():
    need = Hull((Curve(fixed_bytes=1000, bytes_per_sequence=70), Curve(900, 80)))
    for limit in (999, 1000, 1069, 1070, 1500, 2000, 2500):
        fitting = [size for size in range(1, 100) if need.at(size) <= limit]
        assert need.largest(limit) == max(fitting, default=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_peak_comes_in_the_second_pass_of_the_second_step(compiled):
    simulation = simulate(Setup(GPT2_77M, compiled=compiled), 16)
    assert passes_begun(simulation, peak_index(simulation)) == 4


def test_one_backward_alone_misses_gradients_and_optimiser_state():
    simulation = simulate(Setup(GPT2_77M), 16)
    with FakeTensorMode():
        parameters = GPT(GPT2_77M).num_params()
    begun = [index for index in range(1, len(simulation.events)) if _begins(simulation, index)]
    first_pass = list(simulation.allocated())[: begun[1]]
    missed = simulation.peak_bytes - max(first_pass)
    assert missed == pytest.approx(12 * parameters, rel=0.01)


def _begins(simulation, index: int) -> bool:
    before, now = (simulation.events[one].phase for one in (index - 1, index))
    return now == "forward" != before


def test_dropout_keeps_a_byte_for_each_number():
    def masks(dropout: float) -> int:
        setup = Setup(replace(TINY, dropout=dropout))
        return sum(buffer.size_bytes for buffer in simulate(setup, 8).alive_at_peak)

    sites = 2 * TINY.n_layer + 1
    kept = masks(0.1) - masks(0.0)
    assert kept == pytest.approx(sites * 8 * TINY.block_size * TINY.n_embd, rel=0.01)


def test_float16_needs_what_bfloat16_needs_and_a_loss_scale():
    half, brain = (simulate(Setup(TINY, dtype=dtype), 4) for dtype in ("float16", "bfloat16"))
    assert 0 <= half.peak_bytes - brain.peak_bytes <= 4 * 512


@pytest.mark.parametrize("saver", ["selective", "alternate", "block"])
def test_recompute_keeps_less(saver):
    kept = simulate(Setup(SMALL), 8).components_at_peak()["activations"]
    assert simulate(Setup(SMALL, recompute=saver), 8).components_at_peak()["activations"] < kept


def test_8bit_moments_take_a_quarter():
    wide = Setup(SMALL)
    state = simulate(wide, 2).components_at_peak()["optimiser state"]
    saved = simulated_need(wide).at(2) - simulated_need(replace(wide, optimizer_bits=8)).at(2)
    assert saved == pytest.approx(0.75 * state, rel=0.03)


def test_components_add_up_to_the_peak():
    simulation = simulate(Setup(TINY), 4)
    assert simulation.components_at_peak().total() == simulation.peak_bytes
    sizes = [buffer.size_bytes for buffer in simulation.alive_at_peak]
    assert sum(sizes) == simulation.peak_bytes
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("expandable", [False, True])
def test_step_lives_under_its_own_peak_and_dies_under_less(expandable):
    simulation = simulate(Setup(SMALL), 8)
    reserved = simulation.replay(expandable_segments=expandable).peak_reserved_bytes
    assert reserved >= simulation.peak_bytes
    simulation.replay(limit_bytes=reserved, expandable_segments=expandable)
    limit = simulation.peak_bytes - 1
    with pytest.raises(OutOfMemory) as death:
        simulation.replay(limit_bytes=limit, expandable_segments=expandable)
    assert 0 <= limit - death.value.reserved_bytes < LARGE_SEGMENT


def test_death_is_told_with_the_phase_and_the_line_that_asked_for_too_much():
    simulation = simulate(Setup(SMALL, loss="full"), 8)
    with pytest.raises(OutOfMemory) as death:
        simulation.replay(limit_bytes=simulation.peak_bytes - 1, expandable_segments=True)
    (place,) = death.value.__notes__
    assert place.startswith("backward: logits and loss, aten::_log_softmax_backward_data, loss.py:")


def test_need_is_recalled_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    need = simulated_need(Setup(TINY))
    files = list((tmp_path / "nanofit" / "memory").iterdir())
    files[0].write_text("[[5, 7]]")  # whoever reads this does not simulate
    assert simulated_need(Setup(TINY)) == Hull((Curve(5, 7),)) != need
