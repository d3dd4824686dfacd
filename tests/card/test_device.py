"""nanofit/machine/device.py on a card: what it says of it, what it counts, what it bounds."""

import pytest

from tests.card.harness import CONTEXT_MIB, MIB, PROJECT, set_others

pytestmark = pytest.mark.covered
DESCRIBE = "from nanofit.machine.device import describe_device\n"


def test_card_is_described_by_its_driver(card, python):
    code = (
        DESCRIBE
        + """
device = describe_device("auto", local_rank=1)
say(name=device.name, device=str(device.torch_device), dtype=device.precision,
    memory=device.memory_bytes, peak=device.peak_flops, note=device.note)
say(dtype=describe_device("cuda:0", "float16").precision, driver=device.driver)
"""
    )
    (first, second), run = python(code, on=card(devices=2))
    assert first == {
        "name": "NVIDIA GeForce RTX 4070",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "memory": 12282 * MIB,
        "peak": pytest.approx(58.3e12, rel=1e-3),
        "note": "",
    }
    assert second == {"dtype": "float16", "driver": "CUDA 13.0, driver 13000"}
    assert len(run.processes) == 0  # so that a process has no context before it computes


def test_attention_is_the_one_whose_memory_is_forecast(card, python):
    code = (
        DESCRIBE
        + """
describe_device("cuda").enter_thread()
q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="cuda")
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
say()
"""
    )
    on = card("H100 PCIe")
    python(code, on=on, trace=on.folder / "trace", CARD_SCRIPT="-c")
    assert "flash_fwd" in (on.folder / "trace").read_text()


def test_thread_enters_the_card_of_its_rank(card, python):
    code = DESCRIBE + 'describe_device("auto", local_rank=1).enter_thread(); say()'
    _, run = python(code, on=card(devices=2))
    assert run.processes["peak"][:, :2].tolist() == [[0, CONTEXT_MIB * MIB]]


@pytest.mark.parametrize("compiled", [False, True])
def test_forecast_leaves_the_card_alone(python, compiled):
    code = (
        DESCRIBE
        + f"""
from nanofit.settings.shape import GPTConfig
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import simulate
describe_device("cuda")
shape = GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=128, vocab_size=512)
say(peak=simulate(Setup(shape, compiled={compiled}), 8).peak_bytes)
"""
    )
    [seen], run = python(code)
    assert seen["peak"] > 0
    assert len(run.processes) == 0


@pytest.mark.parametrize("capability", ["8.9", "7.5"])
def test_bfloat16_is_taken_only_where_there_is_any(card, python, capability):
    code = DESCRIBE + 'd = describe_device("cuda", "bfloat16"); say(dtype=d.precision, note=d.note)'
    [seen], _ = python(code, on=card(capability=capability))
    is_there = capability == "8.9"
    assert seen["dtype"] == ("bfloat16" if is_there else "float16")
    assert ("no bfloat16" in seen["note"]) != is_there


MEMORY = (
    DESCRIBE
    + """
device = describe_device("cuda")
device.enter_thread()
memory = device.memory()
kept = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
gone = torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
del gone
"""
)


def test_memory_is_counted_in_what_torch_reserves(card, python):
    code = (
        MEMORY
        + """
say(peak=memory.peak_bytes(), allocated=memory.peak_allocated_bytes(), free=memory.free_bytes(),
    vacated=memory.vacated_bytes(), runs_out=memory.can_run_out(), on_card=memory.on_card_bytes())
memory.release()
memory.forget_peak()
say(peak=memory.peak_bytes(), used=memory.used_bytes(), free=memory.free_bytes(), on_card=0)
"""
    )
    (full, after), run = python(code, on=card(others=1000))
    assert full["peak"] >= full["allocated"] == 300 * MIB
    assert full["vacated"] == 200 * MIB
    assert full["runs_out"]
    assert full["free"] == (12282 - CONTEXT_MIB - 1000) * MIB == after["free"]
    assert full["on_card"] == full["peak"] + (CONTEXT_MIB + 1000) * MIB
    assert run.peak_bytes == full["peak"] + CONTEXT_MIB * MIB
    assert 100 * MIB <= after["peak"] == after["used"] < 130 * MIB


def test_number_is_read_without_waiting_for_the_card(python):
    code = (
        DESCRIBE
        + """
device = describe_device("cuda")
device.enter_thread()
numbers = torch.arange(4.0).cuda()
torch.cuda.set_sync_debug_mode("error")  # whatever waits for the card is an error
peek, peek_of_one = device.peek(numbers), device.peek(numbers[1])
torch.cuda.set_sync_debug_mode("default")
device.wait()
numbers.copy_(torch.ones(4))  # what is learned later does not change what was seen
say(ready=peek.ready(), seen=peek.host.tolist(), then=numbers.tolist(), one=peek_of_one.value())
"""
    )
    [seen], _ = python(code, CARD_SCALARS="0:2.5")  # which 4 bytes read back are said to be
    assert seen == {"ready": True, "seen": [0, 1, 2, 3], "then": [1, 1, 1, 1], "one": 2.5}


def test_limit_makes_allocations_fail(python):
    code = (
        MEMORY
        + """
def fits(mib):
    try:
        torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True
memory.limit(500 * 2**20)
say(small=fits(350), large=fits(450), retries=memory.retries() > 0)
memory.limit(2**50)
say(large=fits(450))
"""
    )
    (limited, unlimited), _ = python(code)
    assert limited == {"small": True, "large": False, "retries": True}
    assert unlimited == {"large": True}


def test_memory_moved_to_the_host_is_told(card):
    on = card()
    code = MEMORY + (
        "print('ready', flush=True)\n"
        "while not memory.spilled_bytes(): pass\n"
        "print(memory.spilled_bytes())\n"
    )
    with on.start("-c", f"import torch\n{code}", PYTHONPATH=str(PROJECT)) as started:
        started.wait_for("ready")
        set_others(on.folder, -(CONTEXT_MIB + 80))
        run = started.result(timeout_s=60)
    assert int(run.output.splitlines()[-1]) == 80 * MIB


def test_nothing_is_told_of_the_host_without_nvml(python):
    code = (
        "import sys; sys.modules['pynvml'] = None  # as if it were not installed\n"
        + MEMORY
        + "say(on_card=memory.on_card_bytes(), spilled=memory.spilled_bytes())"
    )
    [seen], _ = python(code)
    assert seen == {"on_card": None, "spilled": 0}


def test_memory_of_a_cpu_is_not_bounded_elsewhere_than_on_linux(card, python):
    code = (
        DESCRIBE
        + """
from pathlib import Path
from nanofit.machine.memory import available_bytes
from nanofit.terminal import InputError

def refuse(path, *_, **__):
    raise FileNotFoundError(path)

Path.read_text = refuse
memory = describe_device("cpu").memory()
try:
    memory.limit(2**30)
except InputError as error:
    say(can_run_out=memory.can_run_out(), said=str(error), available=available_bytes())
"""
    )
    [seen], _ = python(code, on=card(devices=0))
    assert seen == {
        "can_run_out": False,
        "said": "memory_limit on a CPU needs Linux; leave it out",
        "available": None,
    }


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_settings_of_the_allocator_that_a_user_made_are_kept(python, name):
    code = (
        DESCRIBE
        + """
import os
describe_device("cuda")
say(**{key: value for key, value in os.environ.items() if key.endswith("_ALLOC_CONF")})
"""
    )
    asked = {name: "max_split_size_mb:64"} if name else {}
    [seen], _ = python(code, **asked)
    assert seen == (asked or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_lines_for_a_cpu_are_executed_by_the_same_build(card):
    run = card(devices=0).run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", PROJECT / "tests/machine/test_device.py"
    )
    assert run.code == 0, run
