"""What docs/architecture.md and the rooms' own pages say of the tree is so."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

import pytest

from tests.processes import PROJECT

PAGE = (PROJECT / "docs" / "architecture.md").read_text()
ROOMS = sorted(place.parent.name for place in PROJECT.glob("nanofit/*/__init__.py"))
# Says of each module whether its import begins to load torch, and does not wait for the rest.
WHO_LOADS_TORCH = """
import importlib, os, sys

class Begun(BaseException):
    pass

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            raise Begun

sys.meta_path.insert(0, Finder)
for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(module)
        except Begun:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    print(module, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def modules_of(room: str) -> set[str]:
    return {place.stem for place in PROJECT.glob(f"nanofit/{room}/*.py")} - {"__init__"}


def test_every_file_and_room_the_page_names_is_there():
    named = set(re.findall(r"(?:\w+/)+\w*(?:\.\w+)?|\w+\.(?:py|toml|md)", PAGE))
    assert {"learning/step", "data/", "prepare_fineweb.py"} <= named
    places = [PROJECT, PROJECT / "nanofit", PROJECT / "docs"]
    lost = [
        name
        for name in named
        if not any((place / (name + end)).exists() for place in places for end in ("", ".py"))
    ]
    assert not lost


@pytest.mark.skipif(not hasattr(os, "fork"), reason="would take an interpreter for each module")
def test_which_modules_load_torch_is_as_the_table_says():
    told = {}
    for first, _, loads in table("loads torch"):
        if first == "`model.py`":
            told["model"] = loads == "yes"
        elif "/" in first:
            room = first.strip("`/")
            told |= {f"nanofit.{room}.{module}": said(module, loads) for module in modules_of(room)}
        else:
            told |= {f"nanofit.{name}": said(name, loads) for name in in_backticks(first)}
    places = [place for place in PROJECT.glob("nanofit/**/*.py") if place.stem != "__init__"]
    every = {".".join(place.relative_to(PROJECT).with_suffix("").parts) for place in places}
    assert told.keys() == every | {"model"}
    words = [sys.executable, "-c", WHO_LOADS_TORCH, *sorted(told)]
    done = subprocess.run(words, cwd=PROJECT, check=True, capture_output=True, text=True)
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found == {module: str(int(loads)) for module, loads in told.items()}


def said(module: str, loads: str) -> bool:
    """What a cell of the table says of one module of its row."""
    named = module in in_backticks(loads)
    assert re.fullmatch(r"yes|no|all but `.*`|`.*` alone", loads)
    return loads == "yes" or (loads.startswith("all but") != named and loads != "no")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_tells_of_each_of_its_modules_to_whom_it_is(room):
    told = [name for names in users_of(room).values() for name in names]
    assert sorted(told) == sorted(modules_of(room))


@pytest.mark.parametrize("room", ROOMS)
def test_names_a_room_gives_away_are_defined_where_it_says(room):
    for module, names in re.findall(r"`(\w+)`\s\(([^)]*)\)", page_of(room)):
        place = PROJECT / "nanofit" / room / f"{module}.py"
        defined = {name for node in ast.parse(place.read_text()).body for name in names_of(node)}
        looking_like_names = re.findall(r"[A-Za-z]+_\w+|[A-Z]\w*[a-z][A-Z]\w*", names)
        assert set(looking_like_names) <= defined


def test_nobody_reaches_past_what_a_room_gives_away():
    reached = [
        f"{importer} imports {room}.{module}"
        for importer, room, module in imports()
        if module not in users_of(room)["Others"] | users_of(room).get(f"{importer}.py", set())
    ]
    assert not reached


def test_what_rooms_keep_to_themselves_import_linter_holds():
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]
    held = {
        (module, *contract["allowed_importers"])
        for contract in contracts["contracts"]
        if contract["type"] == "protected"
        for module in contract["protected_modules"]
    }
    kept = {
        (f"nanofit.{room}.{module}", f"nanofit.{room}")
        for room in ROOMS
        for module in modules_of(room) - users_of(room)["Others"]
    }
    assert held == kept


@cache
def users_of(room: str) -> dict[str, set[str]]:
    """The modules of a room by who may use them, as its page has it: Others, a script, Its own."""
    users = {"Others": set()}
    for sentence in re.split(r"(?<=\.)\s+(?=Others|Its own|\w+\.py)", page_of(room)):
        user = re.match(r"Others|Its own|\w+\.py", sentence)
        if user:
            users.setdefault(user[0], set()).update(in_backticks(sentence) & modules_of(room))
    return users


def page_of(room: str) -> str:
    return ast.get_docstring(ast.parse((PROJECT / f"nanofit/{room}/__init__.py").read_text()))


@cache
def imports() -> tuple[tuple[str, str, str], ...]:
    """(importer, room, module) of every import from another room; a script may import as well."""
    found = set()
    for place in [*PROJECT.glob("*.py"), *PROJECT.glob("nanofit/**/*.py")]:
        inside = place.relative_to(PROJECT).with_suffix("").parts
        importer = inside[1] if len(inside) == 3 else inside[-1]
        for node in ast.walk(ast.parse(place.read_text())):
            for _, room, module in filter(lambda path: len(path) > 2, imported_by(node)):
                if room in ROOMS and room != importer:
                    found.add((importer, room, module))
    return tuple(sorted(found))


def imported_by(node: ast.AST) -> Iterator[list[str]]:
    """The first three parts of what is imported, of our own."""
    if isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    yield from (path.split(".")[:3] for path in paths if path.startswith("nanofit."))


def names_of(node: ast.stmt) -> Iterator[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def table(title: str) -> list[list[str]]:
    """The rows of the page's table with such a last column."""
    block = next(part for part in PAGE.split("\n\n") if part.startswith("|") and title in part)
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]
    ]


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))
