"""What is kept comes back to the same question only, and a lost cache costs nothing but time."""

import pytest

from nanofit import cache


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_was_kept_is_recalled_under_its_kind_and_key_alone():
    cache.keep("memory", ("a", 1), {"bytes": 5})
    assert cache.recall("memory", ("a", 1)) == {"bytes": 5}
    assert cache.recall("memory", ("a", 2)) is None
    assert cache.recall("speed", ("a", 1)) is None


def test_another_torch_does_not_get_what_this_one_kept(monkeypatch):
    cache.keep("memory", "a", 5)
    monkeypatch.setattr(cache, "version", lambda package: "0.0")
    assert cache.recall("memory", "a") is None


def test_changed_code_does_not_get_what_the_old_code_kept(monkeypatch):
    cache.keep("memory", "a", 5)
    monkeypatch.setattr(cache, "_code_digest", lambda: "other")
    assert cache.recall("memory", "a") is None


def test_damaged_entry_is_no_entry():
    cache.keep("memory", "a", 5)
    (entry,) = (cache.cache_folder() / "memory").iterdir()
    entry.write_text("[1, ")
    assert cache.recall("memory", "a") is None


def test_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.keep("memory", "a", 5)
    assert cache.recall("memory", "a") is None
