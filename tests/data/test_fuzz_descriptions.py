"""Damaged meta.json and progress.json: the right tokens, or one line that says why not."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.data.bins import SPLITS
from nanofit.data.form import has_form
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.processes import wait_for
from tests.shards import make_texts, prepare, start, write_shard

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


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A shard, what is made of it, and what a killed preparation leaves of that."""
    folder = tmp_path_factory.mktemp("made")
    shard = write_shard(folder / "a.parquet", make_texts(1200), group=100)
    prepare(shard, "--out", folder / "whole", "--encoder", "tiktoken")
    process = start(folder / "half", shard)
    progress = folder / "half/progress.json"
    wait_for(
        lambda: progress.exists() and json.loads(progress.read_text())["position"][1] > 100,
        interval_s=0.001,
    )
    process.kill()
    process.communicate()
    (folder / "half/lock").unlink(missing_ok=True)
    assert progress.exists(), "it was over before it was killed"
    return folder


@st.composite
def damages(draw):
    """How to damage a JSON file: another value somewhere, or other bytes."""
    kind = draw(st.sampled_from(["value", "value", "bytes", "cut", "other"]))
    seed = draw(st.integers(0, 2**31))
    return kind, seed, draw(VALUES), draw(st.binary(max_size=5))


def damaged(content: bytes, damage: tuple) -> bytes:
    kind, seed, value, some_bytes = damage
    at = seed % len(content)
    if kind == "bytes":
        return content[:at] + some_bytes + content[at + seed % 3 :]
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


def bins_of(folder: Path) -> dict[str, bytes]:
    return {split: (folder / f"{split}.bin").read_bytes() for split in SPLITS}


@fuzzed
@given(damages())
def test_a_damaged_meta_costs_no_bin(made, capsys, damage):
    out = made / "out"
    shutil.copytree(made / "whole", out, dirs_exist_ok=True)
    meta = out / "meta.json"
    meta.write_bytes(damaged(meta.read_bytes(), damage))
    for words in (
        [made / "a.parquet", "--out", out],
        ["--merge", out, made / "whole", "--out", made / "merged", "--overwrite"],
    ):
        try:
            assert prepare(*words, "--encoder", "tiktoken") == 0
        except InputError as error:
            assert len(str(error).splitlines()) == 1
    assert bins_of(out) == bins_of(made / "whole")
    capsys.readouterr()


@fuzzed
@given(damages())
def test_a_damaged_progress_ends_with_the_right_bins(made, capsys, damage):
    out = made / "resumed"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(made / "half", out)
    progress = out / "progress.json"
    progress.write_bytes(damaged(progress.read_bytes(), damage))
    assert prepare(made / "a.parquet", "--out", out, "--encoder", "tiktoken") == 0
    assert bins_of(out) == bins_of(made / "whole")
    assert (out / "meta.json").read_bytes() == (made / "whole/meta.json").read_bytes()
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    capsys.readouterr()


@pytest.mark.parametrize("content", [b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe{}", b"9" * 10**5])
@pytest.mark.parametrize("name", ["meta.json", "progress.json"])
def test_a_description_that_would_exhaust_its_reader_is_damaged(made, tmp_path, content, name):
    shutil.copytree(made / ("whole" if name == "meta.json" else "half"), tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(content)
    words = [made / "a.parquet", "--out", tmp_path / "out", "--encoder", "tiktoken"]
    if name == "meta.json":
        with pytest.raises(InputError, match=r"not described by a whole meta\.json"):
            prepare(*words)
    else:
        prepare(*words)
        assert bins_of(tmp_path / "out") == bins_of(made / "whole")


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
