"""How long a person waits: for help, for a plan, for the first step of the demo.

    python bench/startup.py          # medians of five, each beside `import torch` in the same round

The demo's data must be there (make demo makes them). Each command is started as a person starts it,
in a fresh interpreter; `import torch` beside it tells how busy the machine was.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
SCRIPTS = ("prepare_fineweb", "plan", "autofit", "train", "sample", "evaluate", "export", "report")
PLAN = ["plan.py", "config/train_fineweb_4070.py", "--gpu", "RTX 4070", "--unique_tokens", "0.73B"]
EXPLAIN = ["autofit.py", "config/train_fineweb_4070.py", "--explain", "--gpu", "RTX 4070"]
COMMANDS = {
    "import torch": (["-c", "import torch"], None),
    **{f"{script} --help": ([f"{script}.py", "--help"], 1.0) for script in SCRIPTS},
    "plan --gpu": (PLAN, 2.0),
    "autofit --explain": (EXPLAIN, 3.0),
}
FIRST_STEP_S = 8.0


def main() -> None:
    seconds = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, (words, _) in COMMANDS.items():
            seconds[name].append(_time(words))
    torch_s = statistics.median(seconds["import torch"])
    print("| command | seconds | of `import torch` | at most | met |\n|---|--:|--:|--:|---|")
    for name, (_, most) in COMMANDS.items():
        _row(name, statistics.median(seconds[name]), torch_s, most)
    if (ROOT / "data/sample/train.bin").exists():
        _row(
            "first step of the demo",
            statistics.median(map(_first_step, range(3))),
            torch_s,
            FIRST_STEP_S,
        )


def _row(name: str, seconds: float, torch_s: float, most: float | None) -> None:
    met = "" if most is None else "yes" if seconds <= most else "no"
    print(
        f"| {name} | {seconds:.2f} | {seconds / torch_s:.2f} | {most or ''} | {met} |", flush=True
    )


def _time(words: list[str]) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def _first_step(_: int) -> float:
    """From the command to the line that tells of step 0, after the demo's own fit."""
    with tempfile.TemporaryDirectory() as folder:
        limit = ["--memory_limit=2GB"] if sys.platform == "linux" else []
        if limit:
            _time(["autofit.py", "config/demo.py", *limit])
        words = ["train.py", "config/demo.py", *limit, f"--out_dir={folder}/out"]
        words.append("--log_interval=1")
        started = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            for line in run.stdout:
                if line.startswith("step 0") and "loss" in line:
                    return time.monotonic() - started
            raise SystemExit("the demo ended before its first step")
        finally:
            run.kill()
            run.wait()


if __name__ == "__main__":
    main()
