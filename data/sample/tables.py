"""What sample documents draw from: the tables of words.txt, computed ones, and forms of words."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

WORDS = Path(__file__).resolve().with_name("words.txt")
FIELD = re.compile(r"{([^}]+)}")

Row = dict[str, str]


def all_tables() -> "Tables":
    """All there is to draw from."""
    worded = {
        **words(),
        "people": people(),
        "friends": friends(),
        "towns": towns(),
        "places": places(),
    }
    return Tables({name: common_first(rows) for name, rows in worded.items()} | numbers())


class Tables:
    """Tables by name, each row holding those forms of its words that some line asks for."""

    def __init__(self, rows_of: dict[str, list[Row]]):
        chance = random.Random(0)  # pairs rows; what a document draws from them is its own affair
        self._sources = {
            name: [(row, _another(row, rows, chance)) for row in stretched(rows)]
            for name, rows in rows_of.items()
        }
        self._draws = {name: [{} for _ in rows] for name, rows in self._sources.items()}

    def draws(self, name: str) -> tuple[list[Row], int]:
        """A table and how many random bits pick one of its rows."""
        return self._draws[name], len(self._draws[name]).bit_length() - 1

    def prepare(self, field: str, known: list[str]) -> str:
        """Give rows the form a field asks for; of tables with such a column known ones go first."""
        parts = field.lower().removesuffix(" 2").split()
        for start in range(len(parts)):
            column = " ".join(parts[start:])
            for name in [*known, *self._sources]:
                if column in self._sources[name][0][0]:
                    self._add_form(name, field, parts[:start], column)
                    return name
        raise KeyError(f"no table has a column for {{{field}}}")

    def _add_form(self, name: str, field: str, modifiers: list[str], column: str) -> None:
        if field in self._draws[name][0]:
            return
        second = field.endswith(" 2")
        for forms, rows in zip(self._draws[name], self._sources[name], strict=True):
            form = rows[second][column]
            for modifier in reversed(modifiers):
                form = MODIFIERS[modifier](form)
            form = capitalised(form) if field[0].isupper() else form
            # People named inside a cell are filled in at the very end, with the whole document.
            for person in FIELD.findall(form):
                self.prepare(person, ["people", "friends"])
            forms[field] = FIELD.sub(r"%(\1)s", form)


def common_first(rows: list[Row]) -> list[Row]:
    """Rows repeated after the law of Zipf and Mandelbrot: the earlier in the list, the oftener."""
    return [row for rank, row in enumerate(rows) for _ in range(1 + 3 * len(rows) // (rank + 6))]


def stretched(rows: list[Row]) -> list[Row]:
    """The rows, some repeated, up to the next power of two: a few random bits then pick one."""
    bits = (len(rows) - 1).bit_length()
    return [rows[position * len(rows) >> bits] for position in range(1 << bits)]


def _another(row: Row, rows: list[Row], chance: random.Random) -> Row:
    """A different row, for lines that name two of a kind."""
    while (other := chance.choice(rows)) is row:
        pass
    return other


def read_sections(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The header and the lines of each [section] of a file, comments and empty lines left out."""
    header, lines = None, []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            if header:
                yield header, lines
            header, lines = line, []
        elif line and not line.startswith("#"):
            lines.append(line)
    yield header, lines


@cache
def words() -> dict[str, list[Row]]:
    """The tables of words.txt, which says how they are written."""
    tables = {}
    for header, lines in read_sections(WORDS):
        name, columns = header.removeprefix("[").split("] ")
        columns = columns.split(" | ")
        cells = [line.split(" | ") for line in lines]
        if len(columns) == 1:
            cells = [[cell.strip()] for line in lines for cell in line.strip(",").split(",")]
        tables[name] = rows(columns, cells)
    return tables


def rows(columns: list[str], cells: Iterable[Sequence]) -> list[Row]:
    """Rows from their cells, each as text."""
    return [dict(zip(columns, map(str, row), strict=True)) for row in cells]


def column(table: str) -> list[str]:
    """The cells of a table of one column."""
    return [cell for row in words()[table] for cell in row.values()]


def people() -> list[Row]:
    """Everyone who may be the hero of a document."""
    return _named(0)


def friends() -> list[Row]:
    """Everyone else, so that a hero and a friend never share a name."""
    return [
        {"friend": row["name"], "friend he": row["he"], "friend his": row["his"]}
        for row in _named(1)
    ]


def _named(parity: int) -> list[Row]:
    """Every second of the names, girls and boys in turn, with their pronouns."""
    she = {"child": "girl", "he": "she", "him": "her", "his": "her"}
    he = {"child": "boy", "he": "he", "him": "him", "his": "his"}
    couples = zip(column("girls")[parity::2], column("boys")[parity::2], strict=True)
    return [row for girl, boy in couples for row in ({"name": girl, **she}, {"name": boy, **he})]


def towns() -> list[Row]:
    """Invented towns; each always lies in the same region, on the same river."""
    chance = random.Random(1)
    names = [
        beginning + ending
        for beginning in column("town beginnings")
        for ending in column("town endings")
    ]
    chance.shuffle(names)
    return [
        {
            "town": name,
            **chance.choice(words()["regions"]),
            **chance.choice(words()["rivers"]),
            "founded": str(chance.randrange(980, 1650)),
            "population": f"{chance.randrange(2, 90)},{chance.randrange(0, 10)}00",
        }
        for name in names
    ]


def places() -> list[Row]:
    """Where something happens, with the preposition that belongs to it."""
    kinds = zip(column("outdoors"), column("indoors"), column("spots"), strict=False)
    return [
        {"place": place, "at place": f"{preposition} the {place}"}
        for kind in kinds
        for preposition, place in zip(("in", "in", "on"), kind, strict=True)
    ]


def numbers() -> dict[str, list[Row]]:
    """Sums, products, change, ages, hours and days, all of them right."""
    spoken, days = column("number words"), column("weekdays")
    return {
        "sums": rows(
            ["first number", "second number", "sum"],
            ((a, b, a + b) for a in range(2, 41) for b in range(2, 41)),
        ),
        "products": rows(
            ["first factor", "second factor", "factor product"],
            ((a, b, a * b) for a in range(2, 13) for b in range(2, 13)),
        ),
        "prices": rows(["price", "change"], ((price, 10 - price) for price in range(2, 9))),
        "lives": rows(
            ["born", "age", "died"],
            ((born, age, born + age) for born in range(1700, 1900, 3) for age in range(41, 93, 2)),
        ),
        "hours": rows(
            ["hour", "hours", "later hour"],
            (
                (spoken[start], f"{spoken[passed - 1]} hours", spoken[(start + passed) % 12])
                for start in range(12)
                for passed in range(2, 6)
            ),
        ),
        "days": rows(
            ["day before", "day", "next day"],
            ((days[i - 1], day, days[(i + 1) % 7]) for i, day in enumerate(days)),
        ),
        "counts": rows(["number"], zip(spoken[1:])),
        "years": rows(["year"], zip(range(1700, 1951))),
        "dates": rows(["date"], zip(range(1, 29))),
    }


def with_article(phrase: str) -> str:
    """`a` or `an` by the sound of the next word."""
    silent_h, spoken_as_you = r"hour|honest|heir", r"us[eu]|uni|eu|one\b"
    sounds_like_vowel = re.match(rf"{silent_h}|(?!{spoken_as_you})[aeiou]", phrase.lower())
    return f"{'an' if sounds_like_vowel else 'a'} {phrase}"


def plural(noun: str) -> str:
    """The plural of a noun or of a phrase that ends in one."""
    *rest, noun = noun.split(" ")
    return " ".join([*rest, irregular("plurals").get(noun, with_s(noun))])


@cache
def irregular(forms: str) -> dict[str, str]:
    """Words that break the rules, with their plurals or pasts."""
    return dict(pair.split() for pair in column(f"irregular {forms}"))


def with_s(word: str) -> str:
    """A regular plural, or the third person of a verb."""
    if re.search(r"(s|x|z|ch|sh|o)$", word):
        return word + "es"
    return re.sub(r"(?<![aeiou])y$", "ie", word) + "s"


def past(phrase: str) -> str:
    """The past tense of a phrase that begins with its verb."""
    verb, *rest = phrase.split(" ")
    regular = re.sub(r"(?<![aeiou])y$", "i", doubled(verb)).removesuffix("e") + "ed"
    return " ".join([irregular("pasts").get(verb, regular), *rest])


def gerund(phrase: str) -> str:
    """The -ing form of a phrase that begins with its verb."""
    verb, *rest = phrase.split(" ")
    return " ".join([re.sub(r"(?<=[^eo])e$", "", doubled(verb)) + "ing", *rest])


def third_person(phrase: str) -> str:
    """What he or she does: a phrase that begins with its verb."""
    verb, *rest = phrase.split(" ")
    return " ".join([with_s(verb), *rest])


def doubled(verb: str) -> str:
    """A short verb before an ending: its last consonant doubles, as in `stopping`."""
    return verb + verb[-1] if re.fullmatch(r"[^aeiou]*[aeiou][^aeiouwxy]", verb) else verb


def title_case(phrase: str) -> str:
    """A phrase as it stands in a title."""
    small = {"a", "an", "and", "for", "of", "on", "over", "the", "to"}
    return " ".join(word if word in small else capitalised(word) for word in phrase.split(" "))


def capitalised(phrase: str) -> str:
    """A phrase with a capital first letter; if that is a field, the field is capitalised."""
    start = phrase.startswith("{")
    return phrase[:start] + phrase[start : start + 1].upper() + phrase[start + 1 :]


MODIFIERS = {
    "a": with_article,
    "plural": plural,
    "past": past,
    "ing": gerund,
    "does": third_person,
    "title": title_case,
}
