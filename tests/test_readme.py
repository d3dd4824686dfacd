"""What the README says to type is typed, in its order, in a copy of the project."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from data.sample.make_shard import main as make_shard
from tests import processes
from tests.processes import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
SMALL = (
    "--n_layer=1 --n_head=1 --n_embd=8 --block_size=32 --batch_size=2 "
    "--gradient_accumulation_steps=2 --max_iters=4 --eval_iters=1 --eval_interval=2 "
    "--device=cpu --compile=False"
).split()
MORE_WORDS = {  # of each script, so that what takes a card days is a matter of seconds
    "train.py": SMALL,
    "prepare_fineweb.py": ["--workers=1"],
    "sample.py": ["--max_new_tokens=4", "--num_samples=1", "--device=cpu"],
    "evaluate.py": ["--device=cpu"],
    "autofit.py": [*SMALL, "--memory_limit=2GB"],
    "plan.py": SMALL,
    "report.py": [],
    "doctor.py": SMALL,
    "export.py": [],
}
CHOSEN = {  # with --model=auto, which knows by itself what is left out here
    "train.py": "--n_layer=1 --n_embd=64 --hours=0.002 --device=cpu --out_dir=out-auto".split(),
    "plan.py": [],
}


def commands() -> list[str]:
    """Of indented blocks, without what is said about them, and within lines."""
    blocks = re.findall(r"^    ((?:python|torchrun) [^#\n]*)", README, re.MULTILINE)
    spans = re.findall(r"`((?:python|torchrun) [^`]*)`", " ".join(README.split()))
    return [*(line.strip() for line in blocks), *spans]


@pytest.fixture
def typed(tmp_path):
    """Type a command in a copy of the project, which knows what the commands before have made."""
    listed = processes.run(["git", "ls-files"], cwd=PROJECT, check=True)
    for name in listed.stdout.split():
        if not name.startswith(("tests", "bench")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PROJECT / name, tmp_path / name)
    environment = os.environ | {"PYTHONPATH": ""}

    def type_it(command: str, *, machines: int = 1) -> None:
        ours, launcher = _words(command)
        more = (CHOSEN if "--model=auto" in ours else MORE_WORDS)[ours[0]]
        more = [] if "--help" in ours else more
        options = {"cwd": tmp_path, "env": environment, "stdin": subprocess.PIPE}
        words = [*launcher, *ours, *more]
        started = [processes.start(words, **options) for _ in range(machines)]
        said = [one.communicate("Hello\n", timeout=processes.TIMEOUT_S) for one in started]
        assert not any(one.returncode for one in started), (command, said)

    return type_it


def _words(command: str) -> tuple[list[str], list[str]]:
    """The script with its words, and what launches it."""
    words = shlex.split(command.replace("config/X.py", "config/train_fineweb_4070.py"))
    at = next(place for place, word in enumerate(words) if word in MORE_WORDS)
    launchers = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    return words[at:], [sys.executable, *launchers[words[0]], *words[1:at]]


def test_every_command_names_a_script_and_every_target_and_link_exists():
    assert len(commands()) > 12
    assert {_words(command)[0][0] for command in commands()} == set(MORE_WORDS)
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z][a-z-]+)\b", README)) - {"sure"}
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert {"demo", "bench-memory"} <= targets <= phony
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (PROJECT / link).exists()]


@pytest.mark.slow
def test_every_command_works_in_its_order(typed, tmp_path):
    make_shard(["--size=300KB", f"--out={tmp_path / '000_00000.parquet'}"])
    (tmp_path / "corpus").mkdir()
    lines = (json.dumps({"content": f"Document {number} of many. " * 20}) for number in range(300))
    (tmp_path / "corpus" / "mine.jsonl").write_text("\n".join(lines))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for command in commands():
        if command.startswith("torchrun"):  # the finished run of before would have nothing to do
            command = command.replace("HOST:29500", f"127.0.0.1:{port}")
            command = command.replace("config/...", "config/train_fineweb_4070.py")
            machines = int(re.search(r"--nnodes=(\d)|$", command)[1] or 1)
            typed(f"{command} --out_dir=out-{machines}-machines", machines=machines)
            assert (tmp_path / f"out-{machines}-machines/ckpt-00000004.pt").exists()
            continue
        if "out-a out-b" in command:
            for copy in ("out-a", "out-b"):
                shutil.copytree(tmp_path / "out-fineweb-4070", tmp_path / copy)
        typed(command)
    made = "data/fineweb/train.bin", "out-fineweb-4070/report.html", "hf-4070/config.json"
    assert all((tmp_path / name).exists() for name in made)
