"""What the report of a long run costs: to write it, to send it, to open it.

    python bench/report.py           # 250,000 steps, each told; the browser is Debian's chromium

Opening is from the call to the page with all its charts drawn, the median of five in one browser.
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.figures import Figure, record  # noqa: E402
from tests.report.stories import whole_run  # noqa: E402

STEPS = 250_000
ROUNDS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        # In a process of its own: what it takes would count as that of all started after it.
        writer = multiprocessing.Process(target=_write, args=(metrics,))
        writer.start()
        writer.join()
        started = time.monotonic()
        command = [sys.executable, ROOT / "report.py", folder, "--quiet"]
        _, status, usage = os.wait4(subprocess.Popen(command).pid, 0)
        assert status == 0
        seconds = time.monotonic() - started
        print(f"{STEPS:,} steps, {metrics.stat().st_size / 1e6:.0f} MB of metrics.jsonl")
        print(f"write  {seconds:.1f} s, of them {usage.ru_utime:.1f} s computing")
        print(f"memory {usage.ru_maxrss / 1024:.0f} MiB at its peak")
        page = Path(folder) / "report.html"
        page_mb = page.stat().st_size / 1e6
        open_s, computing_s = _seconds_to_open(page)
        print(f"page   {page_mb:.2f} MB")
        print(f"open   {open_s:.2f} s, of them {computing_s:.2f} s computing")
        what = f"the report of {STEPS:,} steps"
        record(
            "report",
            [
                Figure(f"{what}: to write", seconds, unit="s"),
                Figure(f"{what}: its size", page_mb, unit="MB"),
                Figure(f"{what}: to open", open_s, unit="s"),
                Figure(f"{what}: to open, computing", computing_s, unit="s"),
            ],
            command="make bench-report",
            conditions=f"chromium, opened {ROUNDS} times, the median",
        )


def _write(metrics: Path) -> None:
    with metrics.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in whole_run(STEPS))


def _seconds_to_open(page: Path) -> tuple[float, float]:
    """In all, and of the page's own process in the browser, from its beginning."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        seconds, computing = [], []
        for _ in range(ROUNDS):
            shown = browser.new_page()
            counted = shown.context.new_cdp_session(shown)
            counted.send("Performance.enable")
            started = time.monotonic()
            shown.goto(page.as_uri())
            shown.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            seconds.append(time.monotonic() - started)
            metrics = counted.send("Performance.getMetrics")["metrics"]
            computing += [one["value"] for one in metrics if one["name"] == "ProcessTime"]
            shown.close()
        browser.close()
    return statistics.median(seconds), statistics.median(computing)


if __name__ == "__main__":
    main()
