"""A report -> one HTML file that needs nothing else, opened from disk or served.

Charts are drawn by uPlot, inlined from the folder beside this file: 50 kB against 4.5 MB of Plotly
or 0.8 MB of Vega, made for series over time, it draws 250,000 points in a blink.

What comes from files is data: it stands in the page as JSON that cannot end its script, and is
shown as text alone. The page's policy lets no script run but the two whose digests it names.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
PARTS = Path(__file__).parent / "page"


def page_of(report: dict[str, Any]) -> str:
    """The whole page."""
    scripts = [_part("uplot/uPlot.iife.min.js"), _part("report.js")]
    filled = {
        "policy": f"{POLICY}; script-src {' '.join(map(_digest, scripts))}",
        "style": _part("uplot/uPlot.min.css") + _part("report.css"),
        "data": as_data(report),
        "uplot": scripts[0],
        "script": scripts[1],
    }
    # Cut first, so that nothing is looked for in what is filled in.
    pieces = _part("report.html").split("{{")
    named = (piece.split("}}", 1) for piece in pieces[1:])
    return pieces[0] + "".join(filled[name] + rest for name, rest in named)


def as_data(value: Any) -> str:
    """JSON in ASCII, and without the character that begins a tag, for inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
