"""Whole files or none; one process a folder."""

import errno

import pytest

from dspark_jax import folders
from dspark_jax.folders import lock, locked, replace


def test_a_kill_while_writing_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    replace(path, lambda new: new.write_text("old"))

    def killed(new):
        new.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(path, killed)
    assert path.read_text() == "old"
    replace(path, lambda new: new.write_text("new"))
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_one_process_own_until_it_ends(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="another process works in it"):
        lock(tmp_path)
    with locked(tmp_path):
        pass


def test_a_disk_without_locks_says_so(tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available"):
        lock(tmp_path)
