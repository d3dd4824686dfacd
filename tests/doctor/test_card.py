"""Card, driver and torch: what is told of machines that do not match, and what is to be done."""

import signal

import pytest

from nanofit.doctor.card import Seen, SeenCard, card_findings, memory_findings, torch_findings
from nanofit.doctor.child import Answer
from nanofit.doctor.system import System
from nanofit.machine.nvml import Driver, DriverCard, Program
from nanofit.settings.config import load_config

GIB, MIB = 2**30, 2**20
LINUX, WSL = System("Linux", "3.12.1", 8), System("WSL", "3.12.1", 8)
ENDED = Answer({}, 0, "", 2.0)
SETTINGS = load_config([])


def driver(*programs: Program, free_mib: int = 12000, cuda: tuple[int, int] = (13, 0)) -> Driver:
    name = "NVIDIA GeForce RTX 4070"
    card = DriverCard(name, (0, 1, 0), 12282 * MIB, free_mib * MIB, 200.0, programs)
    return Driver("580.65.06", cuda, (card,))


def seen(*refusals: str, **facts) -> Seen:
    """What a build for CUDA tells of cards, each refused as given."""
    cards = tuple(
        SeenCard("NVIDIA GeForce RTX 4070", (0, number, 0), 12282 * MIB, (8, 9), refusal)
        for number, refusal in enumerate(refusals, 1)
    )
    if cards and not refusals[0]:
        facts = {"device": "cuda:0", "name": cards[0].name, **facts}
    return Seen(**{"torch": "2.13.0+cu130", "cuda": "13.0", "cards": cards, **facts})


def of_torch(driver: Driver | None, seen: Seen | None, answer: Answer = ENDED, device="auto"):
    return list(torch_findings(driver, seen, answer, load_config([f"--device={device}"]).run))


def test_build_for_cpus_beside_a_card_is_a_problem_unless_a_cpu_is_asked_for():
    cpu_build = seen(torch="2.13.0+cpu", cuda=None, device="cpu", name="CPU, 8 threads")
    [found] = of_torch(driver(), cpu_build)
    assert found.state == "problem"
    assert found.text == "2.13.0+cpu is a build for CPUs, and cannot use the card"
    assert "pytorch.org" in found.remedy
    [asked] = of_torch(driver(), cpu_build, device="cpu")
    [without] = of_torch(None, cpu_build)
    assert asked.state == without.state == "ok"


@pytest.mark.parametrize(
    ("cuda", "refused"), [((12, 9), True), ((13, 0), False), ((13, 1), False), ((14, 0), False)]
)
def test_driver_of_an_older_major_version_is_too_old(cuda, refused):
    [found] = of_torch(driver(cuda=cuda), seen())
    assert ("knows CUDA only up to 12.9" in found.text) == refused
    assert ("580 or newer, or take a torch built for CUDA 12 " in found.remedy) == refused
    assert found.state == "problem"


def test_cards_hidden_by_the_environment_are_told_as_such(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [found] = of_torch(driver(), seen())
    assert "CUDA_VISIBLE_DEVICES='' hides" in found.text


def test_card_that_torch_was_not_built_for_stops_only_a_run_that_takes_it():
    refused = "CARD has CUDA capability 6.1, but torch was built for 9.0; use --device=cpu"
    [first] = of_torch(None, seen(refused, "", refusal=refused, device=""))
    assert (first.state, first.text) == ("problem", refused.partition("; ")[0])
    assert first.remedy == "use --device=cpu; or the other card, --device=cuda:1"
    second = of_torch(None, seen("", refused))
    assert [found.state for found in second] == ["warning", "ok"]
    [both] = of_torch(None, seen(refused, refused, refusal=refused, device=""))
    assert both.remedy == "use --device=cpu"


def test_torch_that_does_not_load_is_told_by_its_last_words():
    failed = Answer({}, 1, "ModuleNotFoundError: No module named 'torch'", 0.1)
    [found] = of_torch(driver(), None, failed)
    assert found.state == "problem"
    assert "No module named 'torch'" in found.text
    assert "requirements.txt" in found.remedy


def test_device_that_hangs_is_a_problem():
    [found] = of_torch(driver(), seen("", device="", name=""), Answer({}, None, "", 120.0))
    assert (found.state, "no answer within 120 s" in found.text) == ("problem", True)


def test_amx_that_is_announced_and_not_granted_is_told_with_the_way_round_it():
    killed = Answer({}, -signal.SIGILL, "", 2.0)
    on_cpu = seen(cuda=None, device="cpu", name="CPU", multiplies=False)
    well, trap = of_torch(None, on_cpu, killed)
    assert (well.state, trap.state) == ("ok", "warning")
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in trap.remedy
    assert len(of_torch(None, on_cpu._replace(multiplies=True))) == 1


@pytest.mark.parametrize(
    ("driver", "seen", "has_card", "state", "said"),
    [
        (None, None, False, "ok", "none: a run computes on the CPU"),
        (None, None, True, "problem", "no driver of NVIDIA's answers"),
        (Driver(refusal="an NVML/RM version mismatch"), None, True, "problem", "mismatch"),
        (driver(), None, True, "ok", "NVIDIA GeForce RTX 4070, 12.0 GiB, driver 580.65.06"),
        (None, seen(device="mps", name="Apple GPU", cuda=None), False, "ok", "Apple GPU"),
    ],
)
def test_card_is_told_by_whoever_knows_it(driver, seen, has_card, state, said):
    [found] = card_findings(LINUX, driver, seen, has_card=has_card)
    assert found.state == state
    assert said in found.text


def test_card_without_nvml_is_told_by_torch():
    card, missing = card_findings(LINUX, None, seen(""), has_card=True)
    assert card.text == "NVIDIA GeForce RTX 4070, 12.0 GiB"
    assert missing.state == "warning" and "nvidia-ml-py" in missing.remedy


def test_card_that_no_table_knows_has_no_forecast_of_time():
    card = driver().cards[0]._replace(name="NVIDIA GeForce GTX 1080")
    [found] = card_findings(LINUX, Driver("580", (13, 0), (card,)), None, has_card=True)
    assert "GTX 1080 (not in the planner's table: no time is forecast)" in found.text


def test_who_uses_the_card_is_told_by_name_the_largest_first():
    programs = [Program(f"program{size}", size * MIB) for size in (900, 500, 300, 200, 100)]
    [found] = memory_findings(LINUX, driver(*programs, free_mib=10000), seen(""), SETTINGS)
    assert found.state == "warning"
    assert found.text == (
        "9.8 of 12.0 GiB free; used by program900 900 MiB, program500 500 MiB, program300 300 MiB, "
        "program200 200 MiB and 1 more"
    )
    [unnamed] = memory_findings(LINUX, driver(free_mib=10000), seen(""), SETTINGS)
    assert "the driver does not tell who uses the rest" in unnamed.text
    [free] = memory_findings(LINUX, driver(), seen(""), SETTINGS)
    assert (free.state, free.text) == ("ok", "11.7 of 12.0 GiB free")


@pytest.mark.parametrize(("free_mib", "is_told"), [(4000, False), (2000, True)])
def test_model_that_does_not_fit_without_savers_is_told(free_mib, is_told):
    gpt2 = load_config(["config/train_gpt2_124m.py"])
    found = list(memory_findings(LINUX, driver(free_mib=free_mib), seen(""), gpt2))
    assert any("one sequence of this model takes" in one.text for one in found) == is_told


def test_windows_drivers_move_memory_to_the_host():
    *_, found = memory_findings(WSL, driver(), seen(""), SETTINGS)
    assert "Prefer No Sysmem Fallback" in found.remedy
