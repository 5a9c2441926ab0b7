"""Folders are made for certain, by several processes at once; nothing is written through a symbolic link."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.base.errors import StateError
from diloco.base.files import make_folders, open_to_write, refuse_links, replacing_file


def test_a_folder_that_another_process_makes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of an island, and peers of one machine, make the folders above theirs at one time."""
    shared, look = tmp_path / "shared", Path.is_dir

    def look_too_early(path: Path) -> bool:
        found = look(path)
        if path == shared and not found:
            shared.mkdir()
        return found

    monkeypatch.setattr(Path, "is_dir", look_too_early)
    make_folders(shared / "own")
    assert (shared / "own").is_dir()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="file"):
            make_folders(path)


def test_a_file_is_replaced_and_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tmp_path / "report"
    outside.write_text("mine")
    beside = tmp_path / f".report.{os.getpid()}.tmp"
    for link in (path, beside):  # the name that it has first may be guessed
        link.symlink_to(outside)
    with replacing_file(path) as file:
        file.write(b"new")
    assert (path.read_text(), path.is_symlink(), outside.read_text()) == ("new", False, "mine")
    with suppress(ValueError), replacing_file(path) as file:
        file.write(b"half")
        raise ValueError
    assert path.read_text() == "new"
    assert {one.name for one in tmp_path.iterdir()} == {"outside", "report"}


def test_no_link_is_opened_to_write(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "link").symlink_to(outside)
    for _ in range(2):  # to nothing, and to a file
        with pytest.raises(StateError, match="link is a symbolic link") as refused:
            open_to_write(tmp_path / "link", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        assert "delete it" in refused.value.fix
        assert not outside.exists() or outside.read_text() == "mine"
        outside.write_text("mine")
    with pytest.raises(FileNotFoundError):
        open_to_write(tmp_path / "missing", os.O_WRONLY)


def test_links_are_refused_at_any_depth_and_the_folder_may_be_one(tmp_path: Path) -> None:
    deep = tmp_path / "disk" / "peer" / "checkpoints" / "v1"
    deep.mkdir(parents=True)
    folder = tmp_path / "runs"
    folder.symlink_to(tmp_path / "disk")
    (folder / "peer" / "data").symlink_to("/")  # a peer writes nothing there
    refuse_links(folder / "peer", ["votes", "checkpoints"])
    (deep / "file").symlink_to(tmp_path / "gone")
    with pytest.raises(StateError, match="peer/checkpoints/v1/file is a symbolic link"):
        refuse_links(folder / "peer", ["votes", "checkpoints"])
