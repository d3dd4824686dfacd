"""Every benchmark, at a size that ends in some 20 minutes on 2 cores, and the table of all of them.

    python bench/all.py [NAME ...]       # those alone

One that cannot run here (for want of a browser, of the CUDA build of torch) or fails is told at the
end, and leaves the figures it had before. Longer ones have commands of their own: make help.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.figures import QUICK, RESULTS, table  # noqa: E402
from nanofit.terminal import InputError, run_script  # noqa: E402

SAMPLE = "data/sample/sample.parquet"
CHROMIUM = "/usr/bin/chromium"
STEP = "config/train_small_30m.py --batch_size=4 --block_size=1024 --dtype=float32"
COMMANDS = {
    "startup": "",
    "loop": "--quick",
    "train_step": STEP,
    "generate": "config/train_gpt2_124m.py --quick",
    "loss": "--quick",
    "muon": "--quick",
    "memory": "77M",
    "autofit": "--limits 2 --rechecks 2 --peer_rechecks 1",
    "prepare": f"{SAMPLE} --million_tokens 20 --rounds 1",
    "prepare_kinds": f"{SAMPLE} --million_tokens 10 --rounds 1",
    "prepare_large": "--gigabytes 0.5",
    "report": "",
    "recipe": "--report",
    "roofline": "",
    "kernels": "--layers 2",
    "cards": "4070 --configs demo,train_fineweb_4070",
}
CUDA = ("kernels", "cards")
SMALLER = ("generate", "loss", "muon", "prepare_large")  # than what has the same name in full
ONE_THREAD = ("generate", "loss")


def main(argv: Sequence[str]) -> None:
    if unknown := set(argv) - set(COMMANDS):
        raise InputError(f"no benchmark {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    make_sample()
    missed = [f"{name}: {why}" for name in argv or COMMANDS if (why := outcome(name))]
    (RESULTS / "README.md").write_text(table(), encoding="utf-8")
    print(f"\n{RESULTS / 'README.md'}: the table of all figures")
    if missed:
        raise InputError(f"not measured again: {'; '.join(missed)}")


def make_sample() -> None:
    """What the demo and the preparation are measured on, unless it is there."""
    if not (ROOT / "data/sample/train.bin").exists():
        for words in (["data/sample/make_shard.py"], ["prepare_fineweb.py", SAMPLE]):
            out = ["--out", "data/sample"] if words[0] == "prepare_fineweb.py" else []
            subprocess.run([sys.executable, *words, *out], cwd=ROOT, check=True)


def outcome(name: str) -> str | None:
    """Run one; why there is nothing new from it, if so."""
    if name in CUDA and not (ROOT / ".venv-cuda/installed").exists():
        return "there is no .venv-cuda; make test-card installs it"
    if name == "report" and not (find_spec("playwright") and Path(CHROMIUM).exists()):
        return "there is no browser to open pages in"
    print(f"\n# {name} {COMMANDS[name]}", flush=True)
    started = time.monotonic()
    words = [sys.executable, f"bench/{name}.py", *COMMANDS[name].split()]
    code = subprocess.run(words, cwd=ROOT, env=_environment(name)).returncode
    print(f"# {name}: {time.monotonic() - started:.0f} s", flush=True)
    return f"exit code {code}" if code else None


def _environment(name: str) -> dict[str, str]:
    told = {QUICK: "1"} if name in SMALLER else {}
    threads = {"OMP_NUM_THREADS": "1"} if name in ONE_THREAD else {}
    return os.environ | told | threads


if __name__ == "__main__":
    run_script(main)
