"""What needs no torch does not load it, which would take seconds."""

import ast
import sys

import pytest

from tests import processes
from tests.processes import PROJECT

SCRIPTS = sorted(place.name for place in PROJECT.glob("*.py") if place.name != "model.py")
CARD = ["config/train_fineweb_4070.py", "--gpu", "RTX 4070"]
COMMANDS = [
    *([script, "--help"] for script in SCRIPTS),
    ["plan.py", *CARD, "--unique_tokens", "0.73B"],
    ["plan.py", "--model=auto", "--gpu=H200", "--hours=24", "--unique_tokens=10B"],
    ["autofit.py", *CARD, "--explain"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{one[0]} {one[-1]}" for one in COMMANDS])
def test_help_and_arithmetic_load_no_torch(command):
    done = processes.run([sys.executable, "-X", "importtime", *command], cwd=PROJECT, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.stdout and "nanofit.terminal" in imported
    assert "torch" not in imported
    if command[-1] == "--help":
        purpose = ast.get_docstring(ast.parse((PROJECT / command[0]).read_text(encoding="utf-8")))
        assert purpose in done.stdout
