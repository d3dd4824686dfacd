"""doctor.py on a card: what torch and its driver tell, and what the card is measured to do."""

import json
from pathlib import Path

import pytest

from nanofit.machine.measured import CardReport
from tests.card.conftest import SMALL
from tests.card.harness import CONTEXT_MIB, MIB, PROJECT

pytestmark = pytest.mark.covered


@pytest.fixture
def examined(card, tokens):
    """Run doctor.py in a small shape; its exit code and the findings by state and topic."""

    def run(*words: str, on=None, **options):
        flags = [*SMALL, f"--dataset={tokens}", "--compile=False", "--json", *words]
        done = (on or card()).run("doctor.py", *flags, **options)
        told = json.loads(done.output)
        assert done.code == (not told["is_well"]), done
        return [(one["state"], one["topic"], one["text"]) for one in told["findings"]][3:], told

    return run


def test_card_that_is_well_is_told_by_its_driver_and_by_torch(examined):
    found, told = examined()
    assert told["is_well"]
    assert found == [
        ("ok", "card", "NVIDIA GeForce RTX 4070, 12.0 GiB, driver 580.65.06, CUDA up to 13.0"),
        ("ok", "torch", found[1][2]),
        ("ok", "memory", "12.0 of 12.0 GiB free"),
    ]
    assert "built for CUDA 13.0; a run would take NVIDIA GeForce RTX 4070" in found[1][2]


HOLD = """
import time, torch
torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
print("ready", flush=True)
time.sleep(600)
"""


def test_who_uses_the_card_is_told_by_name_but_not_the_doctor_itself(card, examined, tmp_path):
    other = card(folder=tmp_path / "other")
    with other.start("-c", HOLD) as holding:
        holding.wait_for("ready")
        state = {"CARD_STATE": str(other.folder / "state")}
        found, _ = examined(on=card(folder=tmp_path / "own"), **state)
        name = Path(f"/proc/{holding.process.pid}/comm").read_text().strip()
    [memory] = [one for one in found if one[1] == "memory"]
    used_mib = 3 * 1024 + CONTEXT_MIB
    assert memory[0] == "warning"
    free = f"{(12282 - used_mib) / 1024:.1f} of 12.0 GiB free"
    assert memory[2] == f"{free}; used by {name} {used_mib:,} MiB"


def test_memory_that_nobody_claims_is_told_and_what_then_lacks(card, examined):
    found, told = examined("--n_embd=768", "--n_layer=12", on=card(others=10300))
    unclaimed, lack = [one for one in found if one[1] == "memory"]
    assert told["is_well"]  # a run would find savers
    assert unclaimed[0] == lack[0] == "warning"
    assert "the driver does not tell who uses the rest" in unclaimed[2]
    assert "one sequence of this model takes" in lack[2]


def test_two_cards_are_told_apart_and_one_can_be_chosen(card, examined):
    found, told = examined("--device=cuda:1", on=card(devices=2))
    assert told["is_well"]
    assert [text for _, topic, text in found if topic == "memory"] == [
        "card 0: 12.0 of 12.0 GiB free",
        "card 1: 12.0 of 12.0 GiB free",
    ]
    found, told = examined("--device=cuda:2", on=card(devices=2))
    assert ("problem", "torch", "no device cuda:2: this machine has 2") in found


def test_card_older_than_torch_was_built_for_stops_a_run(card, examined):
    found, told = examined(on=card("RTX 2060", capability="6.1"))
    assert not told["is_well"]
    [refused] = [text for state, topic, text in found if (state, topic) == ("problem", "torch")]
    assert "has CUDA capability 6.1, but torch" in refused


def test_driver_older_than_the_build_of_torch_stops_a_run(examined):
    found, told = examined(CARD_DRIVER="12040")
    assert not told["is_well"]
    assert found[1][:2] == ("problem", "torch")
    assert "but driver 580.65.06 knows CUDA only up to 12.4" in found[1][2]


def test_driver_that_was_updated_under_a_running_machine_is_told(examined):
    found, told = examined(CARD_NVML_ERROR="18")
    assert found[0][:2] == ("problem", "card")
    assert "version mismatch" in found[0][2]
    assert "restart the machine" in told["findings"][3]["remedy"]


def test_hidden_cards_are_told_with_what_hides_them(examined):
    found, told = examined(CUDA_VISIBLE_DEVICES="-1")
    assert (
        "problem",
        "torch",
        "it sees no card: CUDA_VISIBLE_DEVICES='-1' hides what is there",
    ) in found
    found, told = examined("--device=cpu", CUDA_VISIBLE_DEVICES="-1")
    assert told["is_well"]


def test_card_without_bfloat16_is_told(card, examined):
    found, _ = examined("--dtype=bfloat16", on=card("RTX 2060"))
    [torch] = [text for _, topic, text in found if topic == "torch"]
    assert torch.endswith("has no bfloat16: float16 is used instead")


LOOK = """
from nanofit.machine.nvml import look_at_driver
say(driver=look_at_driver())
"""


@pytest.mark.parametrize("code", ["12", None])  # of "library not found"; None: no nvidia-ml-py
def test_without_nvml_there_is_nothing_to_tell(python, code):
    missing = "" if code else "import sys; sys.modules['pynvml'] = None\n"
    [seen], _ = python(missing + LOOK, **({"CARD_NVML_ERROR": code} if code else {}))
    assert seen == {"driver": None}


@pytest.mark.parametrize(
    ("call", "code", "refusal"),
    [
        ("nvmlSystemGetCudaDriverVersion", 13, "Function Not Found"),
        ("nvmlDeviceGetHandleByIndex", 15, "GPU is lost"),
        ("nvmlDeviceGetMemoryInfo", 15, "GPU is lost"),
    ],
)
def test_card_that_is_lost_while_it_is_looked_at_is_a_refusal(python, call, code, refusal):
    [seen], _ = python(LOOK, CARD_NVML_ERROR=f"{call}:{code}")
    assert seen == {"driver": ["", [0, 0], [], refusal]}


def test_card_that_shares_the_memory_of_its_host_is_told_by_torch(examined):
    found, told = examined(CARD_NVML_ERROR="nvmlDeviceGetMemoryInfo:3")
    assert told["is_well"]
    assert found[0] == ("ok", "card", "NVIDIA GeForce RTX 4070, 12.0 GiB")
    assert [topic for _, topic, _ in found] == ["card", "torch"]


def test_machine_without_a_card_computes_on_its_cpu(card, examined):
    found, told = examined(on=card(devices=0))
    assert told["is_well"]
    assert found[0] == ("ok", "card", "none: a run computes on the CPU")


def test_machine_without_a_card_is_not_measured(card, examined):
    found, told = examined("--measure", on=card(devices=0))
    assert told["is_well"] and told["measured"] is None
    assert found[-1][:2] == ("warning", "measured")
    assert "--measure is for a card, and a run would take CPU" in found[-1][2]


def test_card_that_is_taken_by_others_is_not_measured_and_the_rest_is_told(card, examined):
    found, told = examined("--measure", on=card(others=12200))
    assert not told["is_well"] and told["measured"] is None
    assert found[-1][:2] == ("problem", "measured")
    assert "cuda:0 cannot be used (" in found[-1][2]


def test_compiling_is_tried_with_triton_on_the_card(card, examined):
    found, _ = examined("--compile=True")
    assert found[-1][:2] == ("ok", "compile")
    assert "and Triton" in found[-1][2]


REPORT = """
from dataclasses import asdict
from nanofit.doctor.measure import _report
from nanofit.fit.trial import TrialResult
from nanofit.machine.device import describe_device
device = describe_device("cuda")
torch.version.cuda = {cuda!r}
say(**asdict(_report(device, TrialResult(), [])))
"""


@pytest.mark.parametrize(
    ("name", "cuda", "card_told"),
    [
        ("AMD Instinct MI250X/MI250", None, "AMD Instinct MI250X-MI250"),  # ROCm
        ("NVIDIA GeForce RTX 4060 Ti", "13.0", "GeForce RTX 4060 Ti 16GB"),
    ],
)
def test_report_of_any_card_can_be_read_again_and_is_filed_by_its_memory(
    python, card, name, cuda, card_told
):
    on = card("RTX 4060 Ti 16GB")
    [told], _ = python(REPORT.format(cuda=cuda), on=on, CARD_NAME=name)
    report = CardReport.told(told)
    assert (report.card, report.cuda) == (told["card"], told["cuda"]) == (card_told, cuda or "")


def test_card_is_measured_and_its_report_tells_nothing_of_whose_it_is(card, examined, tmp_path):
    on = card(memory=1500, folder=tmp_path / "mine")
    _, told = examined("--measure", on=on)
    report = CardReport.told(json.loads((on.folder / "doctor.json").read_text()))
    assert CardReport.told(told["measured"]) == report
    assert (report.card, report.memory_mib, report.watts) == ("GeForce RTX 4070", 1500, 200.0)
    assert report.context_bytes == CONTEXT_MIB * MIB
    eager, compiled = report.steps  # one of the three models fits
    assert [eager.compiled, compiled.compiled] == [False, True]
    for step in report.steps:
        assert step.survived
        assert step.allocated_bytes == pytest.approx(step.forecast_bytes, rel=0.001)
        assert step.allocated_bytes <= step.reserved_bytes < 1500 * MIB
        assert step.tokens_per_s > 0
    text = (on.folder / "doctor.json").read_text()
    assert not any(word in text for word in ("/", Path.home().name, PROJECT.name, "mine"))
