"""How long a person waits: for help, for a plan, for the first step of the demo or of any shape.

    python bench/startup.py          # medians of five, each beside `import torch` in the same round

The demo's data must be there (make demo makes them); a shape is unknown where the cache that all
runs of a user share is empty. Each command is started as a person starts it,
in a fresh interpreter; `import torch` beside it tells how busy the machine was.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.figures import Figure, record  # noqa: E402

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
FIRST_STEP_S, UNKNOWN_SHAPE_S = 8.0, 20.0
LIMIT = ["--memory_limit=2GB"] if sys.platform == "linux" else []
DEMO = "first step of the demo"
UNKNOWN = "first step of an unknown shape, fit and all"


def main() -> None:
    figures = []

    def tell(name: str, seconds: float, most: float | None) -> None:
        met = "" if most is None else "yes" if seconds <= most else "no"
        ratio = f"{seconds / torch_s:.2f}"
        print(f"| {name} | {seconds:.2f} | {ratio} | {most or ''} | {met} |", flush=True)
        if most:
            figures.append(Figure(name, seconds, most, "limit", "s"))

    seconds = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, (words, _) in COMMANDS.items():
            seconds[name].append(_time(words))
    torch_s = statistics.median(seconds["import torch"])
    print("| command | seconds | of `import torch` | at most | met |\n|---|--:|--:|--:|---|")
    for name, (_, most) in COMMANDS.items():
        tell(name, statistics.median(seconds[name]), most)
    if (ROOT / "data/sample/train.bin").exists():
        for name, wait, most in (
            (DEMO, demo_after_its_fit, FIRST_STEP_S),
            (UNKNOWN, unknown_shape, UNKNOWN_SHAPE_S),
        ):
            tell(name, statistics.median(wait() for _ in range(3)), most)
    conditions = f"medians, `import torch` took {torch_s:.2f} s"
    record("startup", figures, command="make bench-startup", conditions=conditions)


def demo_after_its_fit() -> float:
    if LIMIT:
        _time(["autofit.py", "config/demo.py", *LIMIT])
    return _first_step(["config/demo.py", *LIMIT])


def unknown_shape() -> float:
    """Of a cache that knows nothing; elsewhere than on Linux a CPU has nothing to fit."""
    with tempfile.TemporaryDirectory() as cache:
        return _first_step(["config/demo.py", "--n_embd=80", *LIMIT], XDG_CACHE_HOME=cache)


def _time(words: list[str]) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def _first_step(words: list[str], **environment: str) -> float:
    """From the command to the line that tells of step 0."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train.py", *words, f"--out_dir={folder}/out", "--log_interval=1"]
        started = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for line in run.stdout:
                if line.startswith("step 0") and "loss" in line:
                    return time.monotonic() - started
            raise SystemExit(f"{words[1]} ended before its first step")
        finally:
            run.kill()
            run.wait()


if __name__ == "__main__":
    main()
