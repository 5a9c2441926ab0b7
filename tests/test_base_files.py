"""Folders are made for certain, by several processes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.base.files import make_folders


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
