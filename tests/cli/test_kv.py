"""`kv` over a disk store: what it does to files that users name."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest
from tests.contract.forked import in_child

from skymemory.cli.main import main

VALUE = b"a value of a few bytes " * 1000


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """The address of a store that has the value under the name ``it``."""
    address = f"disk://{tmp_path / 'tier'}?budget=1MiB"
    (tmp_path / "it").write_bytes(VALUE)
    assert main(["kv", "put", str(tmp_path / "it"), "--store", address]) == 0
    return address


def get(address: str, out: Path, key: str = "it") -> int:
    return main(["kv", "get", key, "--out", str(out), "--store", address])


def test_a_get_that_fails_keeps_the_file_that_was_there(stored: str, tmp_path: Path) -> None:
    """The value is not there, or does not fit on the disk."""
    out = tmp_path / "out"
    out.write_bytes(b"kept")
    assert get(stored, out, "another") != 0 and out.read_bytes() == b"kept"

    def with_little_room() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return get(stored, out)

    assert in_child(with_little_room) == 2
    assert out.read_bytes() == b"kept" and sorted(os.listdir(tmp_path)) == ["it", "out", "tier"]


def test_a_get_writes_to_the_given_path(stored: str, tmp_path: Path) -> None:
    plain, link, linked = (tmp_path / name for name in ("plain", "link", "linked"))
    linked.write_bytes(b"before")
    linked.chmod(0o640)
    link.symlink_to(linked)
    for out in (plain, link):
        assert get(stored, out) == 0 and out.read_bytes() == VALUE
    assert link.is_symlink() and stat.S_IMODE(linked.stat().st_mode) == 0o640
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o666 & ~mask
    assert get(stored, Path("/dev/null")) == 0 and stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert get(stored, tmp_path) == 2


def test_a_path_for_a_key_gets_a_hint(stored: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert get(stored, tmp_path / "out", str(tmp_path / "it")) == 1
    assert "keys are names, not paths: did you mean 'it'?" in capsys.readouterr().err
