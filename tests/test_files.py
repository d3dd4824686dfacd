"""A file or folder is whole or what it was before: after an error, a kill and a full disk."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from nanofit.files import atomic_folder, atomic_write, link_or_copy, sync
from nanofit.settings.config import PROJECT
from tests import processes

CHILD = """
import os, resource, signal, sys
from pathlib import Path
from nanofit.files import atomic_write

{before}
with atomic_write(Path(sys.argv[1]), is_shared={is_shared}) as temporary:
    temporary.write_bytes(b"new" * 100_000)
    {after}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "some.file"
    path.write_bytes(b"old")
    return path


def run_child(path, *, before="", after="", is_shared=False):
    code = CHILD.format(before=before, after=after, is_shared=is_shared)
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    return processes.run([sys.executable, "-c", code, path], env=environment)


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_a_whole_write_takes_the_name(path):
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(path) == ["some.file"]


def test_a_first_write_needs_nothing_there(tmp_path):
    with atomic_write(tmp_path / "first") as temporary:
        assert temporary.parent == tmp_path  # another file system could not be renamed from
        temporary.write_bytes(b"new")
    assert (tmp_path / "first").read_bytes() == b"new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_nothing_else(path, error):
    with pytest.raises(error), atomic_write(path) as temporary:
        temporary.write_bytes(b"ne")
        raise error
    assert path.read_bytes() == b"old"
    assert names(path) == ["some.file"]


def test_a_writer_that_wrote_nothing_leaves_the_old_file(path):
    with pytest.raises(FileNotFoundError), atomic_write(path):
        pass
    assert path.read_bytes() == b"old"


def test_a_kill_before_the_rename_leaves_the_old_file(path):
    child = run_child(path, after="os.kill(os.getpid(), signal.SIGKILL)")
    assert child.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_what_a_kill_left_behind_does_not_hinder_the_next_write(path):
    run_child(path, after="os.kill(os.getpid(), signal.SIGKILL)")
    assert len(names(path)) == 2  # the kill came in mid-write
    assert run_child(path).returncode == 0
    assert path.read_bytes() == b"new" * 100_000
    assert names(path) == ["some.file"]


def test_a_full_disk_leaves_the_old_file_and_gives_its_space_back(path):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    child = run_child(path, before=limit)
    assert child.returncode == 1
    assert "File too large" in child.stderr
    assert path.read_bytes() == b"old"
    assert names(path) == ["some.file"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is behind a descriptor")
def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(behind(descriptor)))
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
    assert order == [(temporary, b"old"), (path.parent, b"new")]


def behind(descriptor):
    """The path behind a descriptor, and what is at the final name at this moment."""
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    folder = path if path.is_dir() else path.parent
    return path, (folder / "some.file").read_bytes()


def test_sync_takes_files_and_folders_and_tells_what_is_missing(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    sync(tmp_path / "file")
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


def test_what_several_write_at_once_is_whole_and_the_last_stays(path):
    with atomic_write(path, is_shared=True) as temporary:
        temporary.write_bytes(b"mine")
        assert run_child(path, is_shared=True).returncode == 0
        assert path.read_bytes() == b"new" * 100_000
    assert path.read_bytes() == b"mine"
    assert names(path) == ["some.file"]


def test_a_second_name_is_a_link_where_there_can_be_one(path):
    link_or_copy(path, path.with_name("other.file"))
    assert path.samefile(path.with_name("other.file"))
    assert names(path) == ["other.file", "some.file"]


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system, to which no link leads."""
    place = Path("/dev/shm")
    if not place.is_dir() or place.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def test_where_there_can_be_no_link_a_second_name_is_a_copy(path, elsewhere):
    other = elsewhere / "other.file"
    with pytest.raises(OSError, match="cross-device"):
        other.hardlink_to(path)
    link_or_copy(path, other)
    assert other.read_bytes() == path.read_bytes() == b"old"
    assert not other.samefile(path)
    assert names(other) == ["other.file"]


def fill(folder: Path) -> Path:
    """A folder with an old file."""
    folder.mkdir()
    (folder / "old.file").touch()
    return folder


@pytest.mark.parametrize("is_first", [True, False])
def test_a_whole_folder_takes_the_name_and_what_was_there_goes(tmp_path, is_first):
    folder = tmp_path / "folder" if is_first else fill(tmp_path / "folder")
    with atomic_folder(folder) as temporary:
        assert temporary.parent == tmp_path
        (temporary / "new.file").write_bytes(b"new")
        assert folder.exists() != is_first
    assert [file.name for file in folder.iterdir()] == ["new.file"]
    assert names(folder) == ["folder"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    folder = fill(tmp_path / "folder")
    with pytest.raises(error), atomic_folder(folder) as temporary:
        (temporary / "new.file").write_bytes(b"half")
        raise error
    assert [file.name for file in folder.iterdir()] == ["old.file"]
    assert names(folder) == ["folder"]


def test_a_folder_that_cannot_take_the_name_leaves_the_old_one(tmp_path, monkeypatch):
    folder, replace = fill(tmp_path / "folder"), Path.replace

    def refuse_new(path, target):
        if path.suffix == ".tmp":
            raise PermissionError
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse_new)
    with pytest.raises(PermissionError), atomic_folder(folder):
        pass
    assert [file.name for file in folder.iterdir()] == ["old.file"]
    assert names(folder) == ["folder"]
