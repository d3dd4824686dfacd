"""What is wrong with this machine, and what would mend it, on one screen.

    python doctor.py
    python doctor.py config/train_fineweb_4070.py
    python doctor.py --measure

Looks at card, driver and torch, at memory and who else uses it, at compiler, disk and data, in ten
seconds or so. Exits with 1 if something would stop a run, or spoil it. --measure trains three
models for two steps each on the card, in some minutes, and compares memory and speed with what is
planned. It writes that into doctor.json, where no name, path or number of yours is, so it can be
sent to who cannot measure your card. Every setting of train.py can be given as well:
--out_dir=/data/out.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanofit.doctor.examine import examine
from nanofit.doctor.finding import Finding, problem, refusal
from nanofit.doctor.screen import Screen, verdict
from nanofit.files import atomic_write
from nanofit.settings.config import RunConfig, load_config
from nanofit.terminal import FlagParser, InputError, run_script

REPORT = Path("doctor.json")


def main(argv: Sequence[str]) -> int:
    asked, rest = _parse(argv)
    settings = load_config(rest)
    findings, measured = [], None
    with Screen(is_quiet=asked.json) as screen:

        def add(finding: Finding) -> None:
            findings.append(finding)
            screen.show(finding)

        for finding in examine(settings, screen.note):
            add(finding)
        if asked.measure and _can_measure(findings):
            measured = _measure(settings.run, screen.note, add)
        elif asked.measure:
            add(Finding("measured", "nothing, for the problem above", state="warning"))
    is_well = all(one.state != "problem" for one in findings)
    if asked.json:
        told = {"is_well": is_well, "findings": list(map(asdict, findings)), "measured": measured}
        print(json.dumps(told, indent=2))
    else:
        screen.say(verdict(findings))
    return 0 if is_well else 1


def _can_measure(findings: list[Finding]) -> bool:
    return not any(one.state == "problem" and one.topic in ("card", "torch") for one in findings)


def _measure(
    run: RunConfig, note: Callable[[str], None], add: Callable[[Finding], None]
) -> dict[str, Any] | None:
    """Train on the card, and leave what it did in a file; None if it cannot be done."""
    from nanofit.doctor.measure import measure_card  # and torch, which takes seconds to load

    try:
        report = measure_card(run, note, add)
    except InputError as error:
        add(refusal("measured", error))
        return None
    if report is None:
        return None
    add(_written(asdict(report)))
    return asdict(report)


def _written(report: dict[str, Any]) -> Finding:
    try:
        with atomic_write(REPORT) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        text = f"{REPORT.absolute()} cannot be written ({error.strerror})"
        return problem("measured", text, "start in another folder")
    sent = "nothing in it tells who or where you are, so please send it to us"
    return Finding("measured", f"wrote {REPORT}: {sent}")


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own flags, and the words that belong to the settings of the run."""
    parser = FlagParser(
        usage="python doctor.py [config/X.py] [--measure] [--json] [--SETTING=VALUE ...]",
        description=__doc__,
    )
    add = parser.add_argument
    add("--measure", action="store_true", help="train on the card to see what it does: minutes")
    add("--json", action="store_true", help="print it for programs")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    run_script(main)
