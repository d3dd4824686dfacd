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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanofit.doctor.examine import examine
from nanofit.doctor.screen import Screen, verdict
from nanofit.files import atomic_write
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import FlagParser, InputError, run_script

REPORT = Path("doctor.json")


def main(argv: Sequence[str]) -> int:
    asked, rest = _parse(argv)
    settings = load_config(rest)
    findings = []
    with Screen(is_quiet=asked.json) as screen:
        for finding in examine(settings, screen.note):
            findings.append(finding)
            screen.show(finding)
    measured = _measure(settings, screen) if asked.measure else None
    is_well = all(one.state != "problem" for one in findings)
    if asked.json:
        told = {"is_well": is_well, "findings": list(map(asdict, findings)), "measured": measured}
        print(json.dumps(told, indent=2))
    else:
        screen.say(verdict(findings))
    return 0 if is_well else 1


def _measure(settings: Settings, screen: Screen) -> dict[str, Any]:
    """Train on the card, and leave what it did in a file."""
    from nanofit.doctor.measure import measure_card  # and torch, which takes seconds to load

    with screen:
        report = measure_card(settings.run, screen.note, screen.show)
    try:
        with atomic_write(REPORT) as temporary:
            temporary.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{REPORT.absolute()} cannot be written ({error.strerror}); start in another folder"
        ) from error
    screen.say(
        f"Wrote {REPORT}: nothing in it tells who or where you are, so please send it to us."
    )
    return asdict(report)


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
