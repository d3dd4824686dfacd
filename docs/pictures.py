"""The README's pictures, of what is there to see: a report, and what --explain prints.

make pictures        # after make demo; needs chromium
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

PROJECT = Path(__file__).resolve().parents[1]
REPORT = PROJECT / "out-demo/report.html"
EXPLAIN = ["autofit.py", "config/train_fineweb_4070.py", "--explain", "--gpu", "RTX 4070"]
COLUMNS = 100


def main() -> None:
    with sync_playwright() as playwright:
        place = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=place, args=["--no-sandbox"])
        _take(browser, REPORT, PROJECT / "docs/report.png", size=(1280, 1300))
        with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as page:
            page.write(_explained())
            page.flush()
            _take(browser, Path(page.name), PROJECT / "docs/explain.png", size=(1000, 910))
        browser.close()


def _take(browser: Browser, page: Path, picture: Path, *, size: tuple[int, int]) -> None:
    """The beginning of a page, as one sees it first."""
    shown = browser.new_page(viewport={"width": size[0], "height": size[1]})
    shown.goto(page.as_uri())
    shown.wait_for_timeout(1000)  # charts are drawn
    shown.screenshot(path=picture)
    shown.close()


def _explained() -> str:
    """What a terminal of so many columns shows, as a page."""
    environment = os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TTY_INTERACTIVE": "0"}
    done = subprocess.run(
        [sys.executable, *EXPLAIN], cwd=PROJECT, env=environment, check=True, capture_output=True
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    command = f'$ python {" ".join(EXPLAIN[:-1])} "{EXPLAIN[-1]}"\n'
    console.print(Text(command, style="bold"), Text.from_ansi(done.stdout.decode()), sep="")
    return console.export_html(inline_styles=True)


if __name__ == "__main__":
    main()
