"""make demo ends with commands that work."""

import os
import shlex
import shutil
import subprocess

import pytest

import sample
from nanofit.settings.config import PROJECT, load_config

SHOW = 'show-end: ; @echo "$$DEMO_ENDS"'


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_commands_that_the_demo_ends_with_are_understood():
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-s", f"--eval={SHOW}", "show-end"],
        cwd=PROJECT,
        env=quiet,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if " python " in line]
    commands = {(words[1], words[2]): words[2:] for words in lines}
    _, demo, _ = load_config(["config/demo.py"])
    _, more, run = load_config(commands["train.py", "config/demo.py"])
    assert more.max_iters > demo.max_iters  # else there is nothing to continue
    assert sample._parse(commands["sample.py", "--out_dir=out-demo"]).out_dir == run.out_dir
    load_config(commands["train.py", "config/train_fineweb_4070.py"])
    assert {script for script, _ in commands} == {"train.py", "sample.py", "prepare_fineweb.py"}
    assert all((PROJECT / script).exists() for script, _ in commands)
