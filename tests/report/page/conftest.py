"""The fixtures of the tests here: a real browser without a window, and pages in it.

They need Playwright (requirements-dev.txt) and Debian's chromium, or another under such a name.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.skipped import skip_all, tell_loudly

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
TIMEOUT_MS = 120_000
DESKTOP, PHONE = (1280, 900), (390, 844)


def why_impossible() -> str | None:
    """Why there can be no browser here, if so."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is missing; pip install -r requirements-dev.txt"
    if not any(map(shutil.which, NAMES)):
        return "chromium is missing; apt-get install chromium"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_impossible():
        skip_all(items, Path(__file__).parent, reason)


def pytest_terminal_summary(terminalreporter) -> None:
    if reason := why_impossible():
        tell_loudly(terminalreporter, "pages", reason)


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),
            executable_path=next(filter(None, map(shutil.which, NAMES))),
            headless=True,
            timeout=TIMEOUT_MS,
            args=FLAGS,
        )
        yield context
        context.close()


@pytest.fixture
def show(browser) -> Iterator[Callable[..., Any]]:
    """Show a page, a file or an address: show(page, size=PHONE, scheme="dark").

    What it complains of (show.complaints) fails the test, and so does what it says in a dialog.
    """
    complaints, pages = [], []

    def open_page(place: Path | str, *, size: tuple[int, int] = DESKTOP, scheme: str = "light"):
        page = browser.new_page()
        pages.append(page)
        page.set_default_timeout(TIMEOUT_MS)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(place.as_uri() if isinstance(place, Path) else place)
        return page

    open_page.complaints = complaints
    yield open_page
    for page in pages:
        page.evaluate("localStorage.clear()")
        page.close()
    assert complaints == []
