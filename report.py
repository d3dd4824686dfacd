"""How a run goes, or went: metrics.jsonl -> one page, and a picture of its curve.

    python report.py out-demo
    python report.py out-a out-b out-c --out compared.html
    python report.py out-demo --watch

The page needs nothing else and opens from disk. It begins with where the first run is; then come
its losses and those that are normal, what happened, what was planned and what came of it, speed,
memory, the text it wrote, and in what the settings of several runs differ. A run may be going on
meanwhile.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanofit.files import atomic_write
from nanofit.terminal import FlagParser, InputError, run_script


def main(argv: Sequence[str]) -> None:
    asked = _parse(argv)
    if asked.watch:
        _watch(asked)
    else:
        _write(asked)


def _write(asked: argparse.Namespace) -> None:
    """The page first: the picture takes longer."""
    from nanofit.report.chart_png import save_png
    from nanofit.report.page import page_of

    say = (lambda text: None) if asked.quiet else print
    report, path = _report(asked.folders), asked.out or asked.folders[0] / "report.html"
    picture, place = path.with_suffix(".png"), path
    try:
        with atomic_write(path, is_shared=True) as temporary:
            temporary.write_text(page_of(report), encoding="utf-8")
        say(f"wrote {path}")
        if asked.open:
            _open(path.resolve().as_uri())
        place = picture
        with atomic_write(picture, is_shared=True) as temporary:
            save_png(report, temporary)
        say(f"wrote {picture}")
    except ImportError:
        say("no picture beside it: pip install 'matplotlib>=3.10,<4' would draw one")
    except OSError as error:
        raise InputError(
            f"{place} cannot be written ({error.strerror}); name another place with --out FILE.html"
        ) from error


def _watch(asked: argparse.Namespace) -> None:
    from nanofit.report.page import page_of
    from nanofit.report.watch import Latest, serve

    def began(address: str) -> None:
        if not asked.quiet:
            print(f"{address} shows the report as the run goes on; Ctrl-C ends it", flush=True)
        if asked.open:
            _open(address)

    def make() -> tuple[float, str]:
        report = _report(asked.folders)
        return report["made"], page_of(report)

    def state() -> list[tuple[int, int]]:
        files = [folder / "metrics.jsonl" for folder in asked.folders]
        stats = [file.stat() for file in files if file.exists()]
        return [(stat.st_mtime_ns, stat.st_size) for stat in stats]

    serve(Latest(make, state), asked.port or 0, began)


def _report(folders: Sequence[Path]) -> dict[str, Any]:
    from nanofit.report.history import read_history
    from nanofit.report.report import report_of  # and numpy

    return report_of([read_history(folder) for folder in folders], made=time.time())


def _open(address: str) -> None:
    import webbrowser

    webbrowser.open(address)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(
        usage="python report.py OUT_DIR [MORE ...] [--out FILE.html | --watch]", description=__doc__
    )
    add = parser.add_argument
    add("folders", metavar="OUT_DIR", type=Path, nargs="+", help="of a run; more are drawn with it")
    add("--out", metavar="FILE", type=Path, help="the page; by default report.html in OUT_DIR")
    add("--watch", action="store_true", help="serve the page instead, to this machine alone")
    add("--port", type=int, metavar="N", help="with --watch: where, instead of any free port")
    add("--open", action="store_true", help="show it in the browser")
    add("--quiet", action="store_true", help="say nothing but what is wrong")
    asked = parser.parse_args(argv)
    asked.folders = list({folder.resolve(): folder for folder in asked.folders}.values())
    if asked.out and asked.watch:
        raise InputError("--watch writes no file; leave --out or --watch out")
    if asked.port is not None and not asked.watch:
        raise InputError("--port goes with --watch")
    if asked.out and asked.out.suffix not in (".html", ".htm"):
        raise InputError(f"--out {asked.out} is no page; name it with .html at its end")
    return asked


if __name__ == "__main__":
    run_script(main)
