"""docs/reliability.md names a test for each fault, and each of them is there."""

import re
from collections import Counter

from tests.processes import PROJECT

ROWS = re.findall(
    r"^\| (.+) \| (.+) \| (.+) \|$", (PROJECT / "docs/reliability.md").read_text(), re.M
)


def test_every_fault_has_a_test_that_is_there():
    places = PROJECT.glob("tests/**/test_*.py")
    written = Counter(
        name for place in places for name in re.findall(r"^def (test_\w+)", place.read_text(), re.M)
    )
    faults = [(fault, proof) for fault, _, proof in ROWS if fault != "fault"]
    assert len(faults) > 40
    for fault, proof in faults:
        named = re.findall(r"`(test_\w+)`", proof)
        assert named, f"no proof of: {fault}"
        assert {name: written[name] for name in named} == dict.fromkeys(named, 1)
