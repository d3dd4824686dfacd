"""Tests of a folder that need what this machine has not: skipped, and nobody overlooks it."""

from pathlib import Path

import pytest


def skip_all(items: list[pytest.Item], folder: Path, reason: str) -> None:
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


def tell_loudly(terminalreporter, what: str, reason: str) -> None:
    """Of several processes it is the one that a person sees which says so."""
    reports = terminalreporter.stats.get("skipped", [])
    count = sum(reason in str(report.longrepr) for report in reports)
    if count:
        told = f"SKIPPED, all {count} tests of {what}: {reason}"
        terminalreporter.write_sep("=", told, red=True, bold=True)
