"""Damaged meta.json and progress.json: the right tokens, or one line that says why not."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepare_fineweb
from nanofit.data.bins import SPLITS, BinWriter
from nanofit.data.dataset import Options, is_done, merge, read_meta
from nanofit.data.form import has_form
from nanofit.data.shards import open_shards
from nanofit.data.source import Position, Shard
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.shards import make_texts, prepare, write_shard

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, 10**400, -1, 0, 1])
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["../../etc/passwd", "/dev/zero", "a\nb", "\0", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


IDENTITY = {"options": {"val_fraction": 0.01, "limit_docs": None}, "sources": [["a", 7, 1]]}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A shard, what is made of it, and what a killed preparation leaves behind."""
    folder = tmp_path_factory.mktemp("made")
    shard = write_shard(folder / "a.parquet", make_texts(60))
    prepare(shard, "--out", folder / "whole", "--encoder", "tiktoken")
    (folder / "half").mkdir()
    with BinWriter(folder / "half", IDENTITY) as writer:
        for row in (10, 20, 30):
            tokens = {split: np.arange(row, dtype=np.uint16) for split in SPLITS}
            writer.append(tokens, Counter(train_tokens=row, val_tokens=row), Position(0, row))
            if row == 20:
                writer.commit()
    return folder


@st.composite
def damages(draw):
    """How to damage a JSON file: another value somewhere, another digit, or other bytes."""
    kind = draw(st.sampled_from(["value", "digit", "bytes", "cut", "other"]))
    seed = draw(st.integers(0, 2**31))
    return kind, seed, draw(VALUES), draw(st.binary(max_size=5))


def damaged(content: bytes, damage: tuple) -> bytes:
    kind, seed, value, some_bytes = damage
    at = seed % len(content)
    if kind == "bytes":
        return content[:at] + some_bytes + content[at + seed % 3 :]
    if kind == "digit":
        digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
        at = digits[seed % len(digits)]
        return content[:at] + b"%d" % ((content[at] + 1) % 10) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "other":
        return json.dumps(value).encode()
    root = json.loads(content)
    places = list(places_of(root))
    holder, key = places[seed % len(places)]
    holder[key] = value
    return json.dumps(root).encode()


def places_of(value):
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_of(value[key])


@pytest.fixture(scope="module")
def asked(made) -> tuple[list[Shard], Options]:
    options = json.loads((made / "whole/meta.json").read_text())["options"]
    return open_shards([str(made / "a.parquet")], "text"), Options(**options)


def use(folder: Path, other: Path, asked: tuple) -> bool:
    """Whatever prepare_fineweb.py does with a described dataset; False if it is refused."""
    try:
        is_done(folder, *asked, overwrite=False)
        meta = merge([folder, other], other.parent)
        prepare_fineweb.check_split(meta)
        prepare_fineweb.summarize(read_meta(folder), (10, 10))
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


@fuzzed
@given(damages())
def test_a_damaged_meta_is_used_or_refused_in_one_line(made, asked, capsys, damage):
    out = made / "out"
    shutil.copytree(made / "whole", out, dirs_exist_ok=True)
    assert use(out, made / "whole", asked)
    meta = out / "meta.json"
    meta.write_bytes(damaged(meta.read_bytes(), damage))
    use(out, made / "whole", asked)
    capsys.readouterr()


@fuzzed
@given(damages())
def test_a_damaged_progress_is_gone_on_from_as_it_was_or_not_at_all(made, damage):
    out = made / "resumed"
    shutil.copytree(made / "half", out, dirs_exist_ok=True)
    progress = out / "progress.json"
    content = damaged(progress.read_bytes(), damage)
    is_the_same = content == progress.read_bytes()
    progress.write_bytes(content)
    with BinWriter(out, IDENTITY) as writer:
        found = {split: (out / f"{split}.bin.partial").read_bytes() for split in SPLITS}
        if writer.restart_reason:
            assert not is_the_same
            assert (writer.position, writer.tally) == (Position(), Counter())
            assert not writer.digests and not writer.rows
            assert not any(found.values()) and not progress.exists()
        else:
            committed = np.concatenate([np.arange(10), np.arange(20)]).astype("<u2").tobytes()
            assert (writer.position, writer.rows) == (Position(0, 20), {"0": 20})
            assert writer.tally["train_tokens"] == 30
            assert all(bytes == committed for bytes in found.values())


@pytest.mark.parametrize("content", [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe{}", b"9" * 10**5])
def test_a_description_that_would_exhaust_its_reader_is_damaged(made, tmp_path, asked, content):
    for name in ("whole/meta.json", "half/progress.json"):
        shutil.copytree(made / name.split("/")[0], tmp_path / name.split("/")[0])
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"not described by a whole meta\.json"):
        is_done(tmp_path / "whole", *asked, overwrite=False)
    with BinWriter(tmp_path / "half", IDENTITY) as writer:
        assert writer.restart_reason == "progress.json is damaged"


def test_a_description_larger_than_any_is_not_read(tmp_path):
    with (tmp_path / "meta.json").open("wb") as file:
        file.truncate(2**40)  # holes: of zero bytes, and of no disk
    assert read_meta(tmp_path) is None


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (-1, int, False),
        (2**63, int, False),
        (1, float, True),
        (float("nan"), float, False),
        ("a", (int, str), True),
        (None, (int, None), True),
        (0, None, False),
        ([1, 2], [int], True),
        ([1, "2"], [int], False),
        ({"a": 1, "b": "free"}, {"a": int}, True),
        ({"b": 1}, {"a": int}, False),
        ({"a": 1, "b": 2}, {...: int}, True),
        ({"a": 1, "b": []}, {...: int}, False),
        ([], {}, False),
    ],
)
def test_a_form_is_what_it_says(value, form, expected):
    assert has_form(value, form) is expected


def test_numbers_of_any_size_are_looked_at():
    assert (
        has_form(10**300, float) is has_form(10**400, float) is has_form(-(10**400), float) is False
    )
    assert has_form(float("nan"), float) is has_form(float("inf"), float) is False
    assert has_form(7, float) and has_form(-0.5, float)
