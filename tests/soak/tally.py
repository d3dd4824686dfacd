"""What the storm has done so far: counted, shown live, and told in tables at the end."""

import time
from collections import Counter, defaultdict

from nanofit.terminal import Progress, duration

COLUMNS = (
    "runs", "launches", "resumed", "faults", "steps done again", "out of memory", "seconds lost"
)  # fmt: skip


class Tally:
    """Counts by course; `problems` is what must not have happened."""

    def __init__(self, progress: Progress):
        self.courses: dict[str, Counter] = defaultdict(Counter)
        self.faults: dict[str, Counter] = defaultdict(Counter)  # by kind, of each course
        self.largest: dict[str, float] = {}  # difference from the undisturbed, by course
        self.problems: list[str] = []
        self._progress, self._started = progress, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add(self, course: str, **counts: float) -> None:
        self.courses[course].update({name.replace("_", " "): n for name, n in counts.items()})
        self.show()

    def struck(self, course: str, kind: str) -> None:
        self.faults[kind][course] += 1
        self.add(course, faults=1)

    def problem(self, course: str, text: str) -> None:
        self.problems.append(f"{course}: {text}")
        self._progress.line(f"DIFFERENT  {course}: {text}", style="red")

    def line(self, text: str) -> None:
        self._progress.line(text)

    def differed(self, course: str, difference: float) -> None:
        self.largest[course] = max(difference, self.largest.get(course, 0.0))

    def show(self) -> None:
        """Bring the live line up to date."""
        total = self._total()
        kills = sum(n.total() for kind, n in self.faults.items() if kind.startswith("SIGKILL"))
        note = (
            f"{total['faults']:.0f} faults, {kills} of them kills; {total['resumed']:.0f} resumed, "
            f"{total['steps done again']:.0f} steps done again, {len(self.problems)} problems"
        )
        self._progress.update(min(self.seconds, self._progress.total), note)

    def tables(self) -> str:
        return f"{self._table_of_courses()}\n\n{self._table_of_faults()}"

    def _table_of_courses(self) -> str:
        lines = [_row("course", *COLUMNS, "largest difference"), _rule(len(COLUMNS) + 2)]
        for name, counts in [*self.courses.items(), ("all", self._total())]:
            largest = f"{self.largest[name]:.2g}" if self.largest.get(name) else "none"
            cells = [f"{counts[column]:,.0f}" for column in COLUMNS]
            lines.append(_row(name, *cells, "" if name == "all" else largest))
        return "\n".join(lines)

    def _total(self) -> Counter:
        """A plain sum: seconds may have been won, which Counter's own leaves out."""
        return Counter({name: sum(one[name] for one in self.courses.values()) for name in COLUMNS})

    def _table_of_faults(self) -> str:
        names = list(self.courses)
        lines = [_row("fault", *names, "all"), _rule(len(names) + 2)]
        for kind, counts in sorted(self.faults.items()):
            cells = [str(counts[name] or "") for name in names]
            lines.append(_row(kind, *cells, str(counts.total())))
        return "\n".join(lines)

    def ending(self) -> str:
        lasted = f"in {duration(self.seconds)}"
        if not self.problems:
            return f"no difference {lasted}"
        return "\n".join([f"{len(self.problems)} problems {lasted}:", *self.problems])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" + "|--:" * (columns - 1) + "|"
