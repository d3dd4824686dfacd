"""Every config on a card, as its user runs it, is stopped and continued."""

import signal
from pathlib import Path

import pytest

from tests.card.harness import CONTEXT_MIB, MIB, PROJECT

CONFIGS = sorted(PROJECT.glob("config/*.py"))
# The width, precision and batch of the config, in one layer and few steps.
SHORTENED = (
    "--n_layer=1 --warmup_iters=1 --compile=True --compile_after=12 --eval_interval=100000 "
    "--eval_iters=2 --log_interval=1 --wandb_log=False"
).split()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_fits_trains_compiles_stops_and_resumes(card, tokens, config: Path):
    on = card()
    flags = [config, *SHORTENED, f"--dataset={tokens}", f"--out_dir={on.folder / 'out'}"]
    # Too long for its end to come before the signal, however slow the machine is.
    with on.start("train.py", *flags, "--max_iters=100000") as started:
        started.wait_for("now compiled")
        started.process.send_signal(signal.SIGTERM)
        stopped = started.result(timeout_s=120)
    assert stopped.code == 0, stopped
    assert "stopped on request; the same command continues the run" in stopped.output
    assert stopped.errors == ""

    end = len(stopped.steps()) + 12  # the first ten of a stage tell its speed
    resumed = on.run("train.py", *flags, f"--max_iters={end}")
    assert resumed.code == 0, resumed
    assert resumed.errors == ""
    assert resumed.steps() == list(range(end))
    assert [event["now"] for event in resumed.events("stage")][:2] == ["eager", "compiled"]
    assert {record["step"] for record in resumed.records("eval")} == {end}
    assert len(resumed.events("resumed")) == 1
    assert_within_limit(stopped, resumed)


def assert_within_limit(*parts) -> None:
    """By the driver's count, no process of a run's parts had more than its limit and context."""
    whole = parts[-1]  # whose metrics are those of all parts
    [begun] = whole.events("started")
    peak_mib = max(part.peak_bytes for part in parts) / MIB - CONTEXT_MIB
    assert peak_mib <= begun["limit_mib"]
    # And the driver's count of the run itself is torch's.
    assert max(event["peak_mib"] for event in whole.events("stage measured")) <= peak_mib
