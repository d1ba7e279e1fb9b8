"""Addresses and folders of a host arena that are refused: each error says what was wrong and what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skymemory.errors import InvalidInput
from skymemory.store.host import arena
from skymemory.testbed.open_store import open_store


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("host://4MiB?at={0}&timeout=2s", "timeout is a client's"),
        ("host:?at={0}", "are the owner's"),
        ("host://{0}?keep=yes", "are the owner's"),
        ("host://{0}?name=a&name=b", "each option once"),
        ("host://4MiB?at={0}&at=/tmp", "each option once"),
        ("host:?timeout=0", "above 0"),
        ("host://4MiB?at=", "from the root on"),
        ("host://4MiB?at=sky", "from the root on"),
        ("host://sky", "'sky' is not a size.*host:///FOLDER attaches"),
        ("host://4GiB/sky", "host:///FOLDER attaches"),
        ("host://0?at={0}", "above 0 bytes"),
        ("host://4MiB?at={0}&colour=red", "unknown option 'colour'"),
        ("host://{0}/" + "x" * 90, "too long"),
        ("host://4MiB?at={0}/" + "x" * 90, "too long"),
        ("host://4MiB?at=/proc/version", "expected a folder"),
        ("tiers:?tier=memory://1MiB&tier=host://4MiB?at={0}", "first tier"),
        ("tiers:?tier=host://4MiB?at={0}%26admit=second&tier=memory://1MiB", "would not know of farther tiers"),
    ],
)
def test_an_address_that_is_wrong_is_refused_and_leaves_nothing(folder: Path, address: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        open_store(address.format(folder))
    assert not [*folder.iterdir()] or address.startswith("host://0")


def test_a_folder_with_another_programs_files_is_refused(folder: Path) -> None:
    (folder / "pages").mkdir()
    (folder / "pages" / "7").write_text("theirs")
    (folder / "values").write_text("theirs")
    with pytest.raises(InvalidInput, match="another program's files"):
        open_store(f"host://4MiB?at={folder}")
    assert (folder / "pages" / "7").read_text() == (folder / "values").read_text() == "theirs"


def test_a_users_umask_makes_no_folder_that_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "default_folder", lambda: folder / "skymemory-7" / "host")
    before = os.umask(0o002)
    try:
        arena.own_folder(folder / "skymemory-7" / "host")
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(made.stat().st_mode) == 0o700 for made in folder.rglob("*"))
