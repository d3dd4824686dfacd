"""Sample documents: the lines of genres.txt, their fields filled from the tables of words.txt.

A row of a table holds words that belong together: an animal, its home and its food; a person and
the pronouns; two numbers and their sum. Drawing a row makes them agree for as long as the draw
holds: a document, a paragraph or a line. So grammar, recurring characters, facts that stay true
and sums that are right are all one mechanism.
"""

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from operator import itemgetter
from pathlib import Path

from data.sample.tables import FIELD, Row, Tables, all_tables, read_sections

MEDIAN_BYTES, SPREAD = 1250, 0.95  # of the log-normal length at which a document ends
LONGEST_BYTES = 18_000
LINES_PER_PARAGRAPH = (2, 3, 3, 4, 4, 5, 6)

GENRES = Path(__file__).resolve().with_name("genres.txt")

Draws = tuple[tuple[list[Row], int], ...]  # tables of 2**bits rows, with the bits


@dataclass(frozen=True)
class Line:
    """A text with `%s` for its fields, how to find their words, and what to draw for them first."""

    pattern: str
    words: Callable[[Row], tuple[str, ...] | str]
    draws: Draws


@dataclass(frozen=True)
class Genre:
    """A kind of document: what is drawn for all of it and for each paragraph, and its lines."""

    layout: str
    document: Draws
    paragraph: Draws
    lines: dict[str, list[Line]]


def write(seed: int, number: int) -> str:
    """The text of one document, a function of (seed, number) alone."""
    chance = random.Random((seed << 64) + number)
    genre = pick(genres(), chance)
    bytes_wanted = min(chance.lognormvariate(math.log(MEDIAN_BYTES), SPREAD), LONGEST_BYTES)

    cast = {}
    draw(genre.document, cast, chance)
    parts = [fill(pick(genre.lines[kind], chance), cast, chance) for kind in ("title", "open")]
    lines = in_random_order(genre.lines["then"], chance)
    bytes_written = sum(map(len, parts))
    while bytes_written < bytes_wanted:
        parts.append(write_paragraph(genre, lines, cast, chance))
        bytes_written += len(parts[-1])
    if len(parts) > 2:
        parts.append(fill(pick(genre.lines["end"], chance), cast, chance))
    # Words such as "{he} ran" bring fields of their own, which name people of the whole document.
    return "\n\n".join(parts) % cast


def write_paragraph(genre: Genre, lines: Iterator[Line], cast: Row, chance: random.Random) -> str:
    """A first line and a few others, all about what is drawn for this paragraph."""
    draw(genre.paragraph, cast, chance)
    first = fill(pick(genre.lines["turn"], chance), cast, chance)
    others = islice(lines, pick(LINES_PER_PARAGRAPH, chance))
    others = [fill(line, cast, chance) for line in others]
    if genre.layout == "steps":
        others = [f"{step}. {text}" for step, text in enumerate(others, start=1)]
    return (" " if genre.layout == "prose" else "\n").join([first, *others])


def in_random_order(lines: list[Line], chance: random.Random) -> Iterator[Line]:
    """The lines again and again, none a second time before all have come once."""
    while True:  # sorting by chance takes a fifth of the time of `random.sample`
        yield from sorted(lines, key=lambda _: chance.random())


def fill(line: Line, cast: Row, chance: random.Random) -> str:
    """The text of a line; what it draws joins the cast."""
    draw(line.draws, cast, chance)
    return line.pattern % line.words(cast)


def draw(draws: Draws, cast: Row, chance: random.Random) -> None:
    """Put one row of each table into the cast, in place of the last one."""
    for table, bits in draws:
        cast.update(table[chance.getrandbits(bits)])


def pick(choices: list | tuple, chance: random.Random):
    """One of the choices; `random.choice` would take twice the time."""
    return choices[int(chance.random() * len(choices))]


@cache
def genres() -> list[Genre]:
    """All genres, each as often as its share says."""
    tables = all_tables()
    return [genre for _, entries in read_sections(GENRES) for genre in read_genre(entries, tables)]


def read_genre(entries: list[str], tables: Tables) -> list[Genre]:
    """A genre from its entries, `kind: text` each, repeated by its share."""
    texts = {}
    for entry in entries:
        kind, text = entry.split(": ", 1)
        texts.setdefault(kind, []).append(re.sub(" ?/ ", "\n", text))
    share, layout = (texts.pop(kind)[0] for kind in ("share", "layout"))
    lasting = [texts.pop(kind)[0].split(", ") for kind in ("document", "paragraph")]
    document, paragraph = (tuple(map(tables.draws, names)) for names in lasting)
    known = lasting[0] + lasting[1]
    lines = {kind: [read_line(text, tables, known) for text in texts[kind]] for kind in texts}
    return [Genre(layout, document, paragraph, lines)] * int(share)


def read_line(text: str, tables: Tables, known: list[str]) -> Line:
    """A line of a genre, of which the tables in `known` are drawn already."""
    fields = FIELD.findall(text)
    needed = {tables.prepare(field, known): None for field in fields}  # a set that keeps its order
    draws = tuple(tables.draws(name) for name in needed if name not in known)
    words = itemgetter(*fields) if fields else lambda cast: ()
    return Line(FIELD.sub("%s", text), words, draws)
