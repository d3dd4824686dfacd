"""What benchmarks have found: a JSON file for each in results/, and one table of all of them.

python bench/figures.py          # makes results/README.md from the files that are there
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
QUICK = "NANOFIT_BENCH_QUICK"  # in the environment: at a smaller size than figures of that name
_HEAD = """\
# Results

Made by `python bench/figures.py` from the files beside it, which the benchmarks write; `make bench`
runs all of them. The ratio is how many times better ours is; of a limit, 1.00 and more keeps it.
What the longer ones say is told in pages of their own here.

| figure | ours | other | whose | ratio | command | when and how |
|---|--:|--:|---|--:|---|---|
"""


@dataclass(frozen=True)
class Figure:
    """Something found out: ours, and a peer's or a limit beside it."""

    name: str
    ours: float
    other: float | None = None
    of: str = ""  # whose the other is
    unit: str = ""
    is_less_better: bool = True
    out_of: int | None = None  # of how many ours and the other are counted

    @property
    def ratio(self) -> float | None:
        """How many times better ours is."""
        if not self.other or not self.ours:
            return None
        return self.other / self.ours if self.is_less_better else self.ours / self.other


def record(bench: str, figures: Sequence[Figure], *, command: str, conditions: str) -> None:
    """Keep figures in a benchmark's file, in place of those that had their names."""
    path = RESULTS / f"{bench}.json"
    if os.environ.get(QUICK):
        figures = [replace(figure, name=f"{figure.name}, quick") for figure in figures]
        command = f"python bench/all.py {bench}"
    known = {one["name"]: one for one in read(path)}
    how = {
        "command": command,
        "measured": date.today().isoformat(),
        "conditions": f"{conditions}; {_machine()}",
    }
    known |= {figure.name: {**asdict(figure), **how} for figure in figures}
    path.write_text(json.dumps(list(known.values()), indent=1, ensure_ascii=False) + "\n")


def take_quick(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether less is enough, and the other words of the command."""
    return "--quick" in argv, [word for word in argv if word != "--quick"]


def read(path: Path) -> list[dict[str, Any]]:
    """The figures of a file; none where there is no such file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def all_figures() -> Iterator[dict[str, Any]]:
    """Those of all benchmarks, in the order of their names."""
    for path in sorted(RESULTS.glob("*.json")):
        yield from read(path)


def table() -> str:
    """The page that tells all of them."""
    return _HEAD + "".join(map(_row, all_figures()))


def told(value: float | None, unit: str, out_of: int | None = None) -> str:
    """A value as a person reads it: three digits that count."""
    if value is None:
        return "-"
    digits = f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
    return " ".join([digits, *([f"of {out_of:,}"] if out_of else []), *([unit] if unit else [])])


def _row(kept: dict[str, Any]) -> str:
    how = {name: kept[name] for name in ("command", "measured", "conditions")}
    figure = Figure(**{name: value for name, value in kept.items() if name not in how})
    cells = [
        figure.name,
        told(figure.ours, figure.unit, figure.out_of),
        told(figure.other, figure.unit, figure.out_of),
        figure.of,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        f"`{how['command']}`",
        f"{how['measured']}: {how['conditions']}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _machine() -> str:
    load = f", load {os.getloadavg()[0]:.0f}" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores{load}, torch {version('torch')}"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(table(), encoding="utf-8")
