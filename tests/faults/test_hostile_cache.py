"""What lies in the cache is used if nobody but its owner can have put it there."""

import json
import os
from pathlib import Path

import pytest

from nanofit import cache
from nanofit.fit.trial import share_compile_cache

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are posix's")
as_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can give files to others"
)
SOMEBODY = 12_345  # a user who is not this one
PLANTED = {"bytes": 0}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the cache will be; what it tells once is told anew in each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache._tell_once.cache_clear()
    return tmp_path / "nanofit"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_cache_is_its_owners_alone_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        cache.keep("memory", "a", 5)
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder / "memory")) == (0o700, 0o700)
    assert cache.recall("memory", "a") == 5


def test_an_older_cache_that_others_could_read_is_closed(folder):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    cache.keep("memory", "a", 5)
    assert mode(folder) == 0o700
    assert cache.recall("memory", "a") == 5


def open_to_group(path: Path) -> None:
    path.chmod(0o770)


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


def give_away(path: Path) -> None:
    os.chown(path, SOMEBODY, SOMEBODY)


def replace_by_a_link(path: Path) -> None:
    """Somebody's, to what is ours."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    os.lchown(path, SOMEBODY, SOMEBODY)


def lead_elsewhere(path: Path) -> None:
    """Our link, to what is somebody's."""
    path.rename(path.with_name("elsewhere"))
    give_away(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


HOW = [
    open_to_group,
    open_to_all,
    *(pytest.param(one, marks=as_root) for one in (give_away, replace_by_a_link, lead_elsewhere)),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["folder", "kind", "entry"])
def test_what_others_could_have_written_is_not_used_and_a_line_says_so(folder, how, what, capsys):
    cache.keep("memory", "a", 5)
    (entry,) = (folder / "memory").iterdir()
    entry.write_text(json.dumps(PLANTED))
    assert cache.recall("memory", "a") == PLANTED
    how({"folder": folder, "kind": entry.parent, "entry": entry}[what])
    assert cache.recall("memory", "a") is None
    assert cache.recall("memory", "a") is None
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "not used" in told
    if what != "entry":
        before = sorted(folder.rglob("*"))
        cache.keep("memory", "b", 6)
        assert sorted(folder.rglob("*")) == before


def test_compiled_code_lies_in_the_cache(folder, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")  # to be put back
    share_compile_cache()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == folder / "compiled"
    assert mode(folder) == 0o700


def test_compiled_code_of_others_is_not_run(folder, monkeypatch, capsys):
    (folder / "compiled").mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    share_compile_cache()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder not in used.parents
    assert (mode(used), list(used.iterdir()), used.owner()) == (0o700, [], folder.owner())
    assert "others can write" in capsys.readouterr().err
