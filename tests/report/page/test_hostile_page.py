"""Records made to do harm, in a real browser: every text of theirs is shown as text."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from nanofit.report.history import read_history
from nanofit.report.page import page_of
from nanofit.report.report import report_of
from tests.report import stories
from tests.report.stories import event, write

ATTACKS = {
    "ends the data": '</script><script>window.owned = 1; alert("owned")</script>',
    "ends it as a comment": "<!--<script>--></script><script>window.owned = 1</script>",
    "is an image": '<img src=x onerror="window.owned = 1; alert(1)">',
    "is a drawing": '<svg onload="window.owned = 1"><script>window.owned = 1</script></svg>',
    "leaves an attribute": "\"'><iframe srcdoc='<script>parent.owned = 1</script>'></iframe>",
    "is a link": '<a href="javascript:window.owned = 1" autofocus onfocus="owned = 1">x</a>',
    "is a style": "<style>body { display: none }</style>",
    "is a template": "{{script}}{{data}}${alert(1)}`",
    "ends a line": "\u2028\u2029window.owned = 1\n//</title>\0",
    "is code": "');window.owned = 1;//__proto__",
}
ENDINGS = {"a": [event(100, "diverged", reason="the loss is nan")], "b": []}
TAGS = (
    "img, svg, iframe, a[href^='javascript'], object, embed, form, base, meta[http-equiv=refresh]"
)


def everywhere(value: Any, evil: str, keep: Callable[[str, Any], bool]) -> Any:
    """The same with every text and an own name made evil, but what `keep` says."""
    if isinstance(value, dict):
        made = {
            name: one if keep(name, one) else everywhere(one, evil, keep)
            for name, one in value.items()
        }
        return made if "kind" in value else made | {evil: evil, "__proto__": evil}
    return evil if isinstance(value, str) else value


def is_kept_for_its_story(name: str, value: Any) -> bool:
    """Else no record would be read: of events those keep their names that end a run."""
    return name == "kind" or (name == "name" and value in ("diverged", "stage", "stage measured"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
def test_nothing_in_a_record_becomes_more_than_text(kind, show, tmp_path):
    evil = ATTACKS[kind]
    folders = []
    for name, ending in ENDINGS.items():
        story = [*stories.whole_run(40), *ending]
        records = [everywhere(record, evil, is_kept_for_its_story) for record in story]
        folders.append(write(tmp_path / "<b onclick=alert(1)>" / name, records))
    report = report_of([read_history(folder) for folder in folders], made=0.0)
    path = tmp_path / "report.html"
    path.write_text(page_of(report), encoding="utf-8")
    page = show(path)
    assert page.locator("script").count() == 3
    assert page.locator("style").count() == 1
    assert page.locator(TAGS).count() == 0
    assert page.locator("b[onclick]").count() == 0
    assert page.evaluate("[window.owned, Object.prototype.owned]") == [None, None]
    assert page.locator("#samples").is_visible()
    shown = page.evaluate("document.body.textContent")
    assert shown.count(evil) >= 10
    assert json.loads(page.locator("#data").text_content())["runs"][0]["samples"][0]["text"] == evil
    # What the browser complains of, as of a script that its policy refuses, fails the test as well.
