"""The card itself: what it counts, what it refuses, what it tells."""

import os
import sys

import pytest

from tests import processes
from tests.card.covered import asking
from tests.card.harness import CONTEXT_MIB, MIB, PROJECT, UnknownCall, set_others


def test_driver_counts_what_torch_reserves_and_the_context(python):
    code = """
x = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
say(reserved=torch.cuda.memory_reserved(), used=total - free, total=total)
"""
    [seen], run = python(code)
    assert seen["used"] == seen["reserved"] + CONTEXT_MIB * MIB
    assert run.peak_bytes == seen["used"]
    assert seen["total"] == 12282 * MIB


def test_expandable_segments_are_counted_alike(python):
    code = """
x = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
reserved = torch.cuda.memory_reserved()
del x
torch.cuda.empty_cache()
say(reserved=reserved, left=torch.cuda.memory_reserved(), free=torch.cuda.mem_get_info()[0])
"""
    [seen], run = python(code, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert run.peak_bytes == seen["reserved"] + CONTEXT_MIB * MIB
    assert seen["left"] == 0
    assert seen["free"] == (12282 - CONTEXT_MIB) * MIB


@pytest.mark.parametrize("others", [0, 1000])
def test_card_refuses_what_it_has_not(card, python, others):
    code = """
taken = []
try:
    while True:
        taken.append(torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    say(taken=len(taken))
"""
    [seen], _ = python(code, on=card("RTX 4060", others=others))
    assert seen["taken"] == (8188 - CONTEXT_MIB - others) // 100


def test_processes_see_each_others_memory(python):
    code = """
import subprocess, sys
x = torch.empty(500 * 2**20, dtype=torch.uint8, device="cuda")
code = "import torch; print(torch.cuda.mem_get_info()[0])"
run = lambda: int(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
say(free=run())
del x
torch.cuda.empty_cache()
say(free=run())
"""
    (before, after), run = python(code)
    assert before["free"] == (12282 - 2 * CONTEXT_MIB - 500) * MIB
    assert after["free"] == (12282 - 2 * CONTEXT_MIB) * MIB
    assert len(run.processes) == 3


def test_other_programs_take_memory_in_mid_run(python):
    code = """
say(free=torch.cuda.mem_get_info()[0])
x = torch.zeros(8, device="cuda")
for _ in range(4):
    x.add_(1)
say(free=torch.cuda.mem_get_info()[0])
"""
    (before, after), _ = python(code, others_after="3:4000")
    assert before["free"] - after["free"] == (4000 + 2) * MIB


def test_other_programs_take_memory_for_a_moment(python):
    code = """
x = torch.zeros(8, device="cuda")
refused = 0
for _ in range(5):
    try:
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        refused += 1
say(refused=refused, free=torch.cuda.mem_get_info()[0])
"""
    # torch asks once more when it has given back what it kept.
    [seen], _ = python(code, others_after="1:12282*4")
    assert seen == {"refused": 2, "free": (12282 - CONTEXT_MIB - 1024 - 2) * MIB}


def test_copies_copy_and_kernels_do_nothing(python):
    code = """
there = torch.arange(1000).cuda()
say(sum=there.cpu().sum().item(), after=(there + 1).cpu().sum().item())
"""
    [seen], _ = python(code)
    assert seen == {"sum": sum(range(1000)), "after": 0}


def test_scalars_are_what_the_test_says(python):
    code = """
x = torch.zeros(1, device="cuda")
say(value=x.item())
for _ in range(5):
    x.add_(1)
say(value=x.item(), count=torch.zeros(1, dtype=torch.int64, device="cuda").item())
"""
    (before, after), _ = python(code, scalars="0:2.5,5:7")
    assert before == {"value": 2.5}
    assert after == {"value": 7, "count": 1}


def test_launches_are_counted_and_traced(python, tmp_path):
    code = """
x = torch.zeros(64, 64, device="cuda")
y = (x @ x).exp()
say()
"""
    _, run = python(code, trace=tmp_path / "trace")
    names = (tmp_path / "trace").read_text().splitlines()
    assert len(names) == run.processes["launches"].sum()
    assert [name for name in names if "cublas" in name] == ["cublasSgemm"]
    assert sum("exp_kernel" in name for name in names) == 1


def test_card_is_what_its_name_says(card, python):
    code = """
p = torch.cuda.get_device_properties(1)
say(name=p.name, capability=[p.major, p.minor], sms=p.multi_processor_count,
    devices=torch.cuda.device_count(), sees=torch.cuda.is_bf16_supported(including_emulation=False))
"""
    [seen], _ = python(code, on=card("RTX 2080 Ti", devices=2))
    assert seen == {
        "name": "NVIDIA GeForce RTX 2080 Ti",
        "capability": [7, 5],
        "sms": 68,
        "devices": 2,
        "sees": False,
    }


@pytest.mark.parametrize(
    "call", ["cudaGraphUpload", "cuMemHostUnregister", "ncclReduce", "nvmlDeviceGetTemperature"]
)
def test_unknown_call_is_told_and_fails_the_run(card, call):
    code = f"import torch, ctypes; torch.cuda.init(); ctypes.CDLL(None).{call}()"
    with pytest.raises(UnknownCall, match=f"stub {call}"):
        card().run("-c", code)


def test_lines_that_ask_for_cuda_are_found_whatever_they_look_like():
    source = """
if device.type == "cuda" and x:
    pass
elif left.is_cuda or y:
    pass
is_timed = device.type == "cuda"
backend = "nccl" if torch.cuda.is_available() else "gloo"
name = "cuda"
if name:
    pass
watch(is_bounded=device.type == "cuda" or z)
"""
    assert asking(source) == ([2, 4], [6, 7, 11])


def test_missing_entry_point_is_told(card):
    code = """
import ctypes, torch
torch.cuda.init()
found = ctypes.c_void_p(1)
ctypes.CDLL(None).cuGetProcAddress_v2(b"cuNobodyHasThis", ctypes.byref(found), 13000, 0, None)
assert found.value is None
"""
    with pytest.raises(UnknownCall, match="missing cuNobodyHasThis"):
        card().run("-c", code)


def test_memory_can_be_taken_from_outside(card):
    on = card()
    code = """
import torch
free = lambda: torch.cuda.mem_get_info()[0]
before = free()
print("ready", flush=True)
while free() == before:
    pass
print(before - free())
"""
    with on.start("-c", code) as started:
        started.wait_for("ready")
        set_others(on.folder, 5000)
        run = started.result(timeout_s=60)
    assert int(run.output.splitlines()[-1]) == 5000 * MIB


@pytest.mark.parametrize("workers", [0, 1])
def test_machine_without_a_compiler_says_loudly_that_nothing_was_tested(workers):
    command = [sys.executable, "-m", "pytest", "tests/card/test_cards.py", f"-n{workers}"]
    run = processes.run(command, env={**os.environ, "PATH": ""}, cwd=PROJECT)
    assert run.returncode == 0, run.stdout
    assert "tests of CUDA: a card without a GPU needs gcc" in run.stdout
