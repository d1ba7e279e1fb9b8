"""Files that users name: whatever stands there, each reader ends at once with an error that says what was wrong."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skymemory import files
from skymemory.cache.prefetching import read_habits
from skymemory.cli.main import main
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.errors import InvalidInput
from skymemory.files import MAX_SETTINGS_BYTES, open_file, read_bounded, write_private
from skymemory.router.envoy.endpoints import FileSource
from skymemory.router.prefix_state import load_index
from skymemory.router.settings import read_cost, read_settings
from skymemory.router.tls import Certificate, from_files, self_signed
from skymemory.testbed.control import read_outages
from skymemory.testbed.key_file import read_keys
from skymemory.testbed.open_store import open_store
from skymemory.testbed.plan_file import load_plan
from skymemory.testbed.run_directory import RunDirectory

pytest.importorskip("skymemory_lab", reason="the laboratory is not installed")

from skymemory_lab.sim.trace import read_trace


def _outages(path: Path) -> None:
    directory = RunDirectory(path.parent)
    path.rename(directory.outages_path)
    read_outages(directory)


def _from_device(path: Path) -> Path:
    """Opened by a link: a device cannot be made here, and links are followed."""
    path.symlink_to("/dev/zero")
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path, 0o600)
    return path


def _folder(path: Path) -> Path:
    path.mkdir(0o700)
    return path


READERS: dict[str, Callable[[Path], Any]] = {
    "plan": load_plan,
    "keys": read_keys,
    "hierarchy": lambda path: open_store(f"tiers://{path}"),
    "seal": lambda path: open_store(f"memory://1MiB?seal={path}"),
    "settings": lambda path: read_settings(path),
    "cost": read_cost,
    "certificate": lambda path: from_files(path, path),
    "endpoints": lambda path: FileSource(path, print),
    "index": lambda path: load_index(path, ApproximatePrefixIndex(), "bytes-64", {}),
    "habits": read_habits,
    "trace": read_trace,
    "outages": _outages,
}


@pytest.mark.parametrize("make", [_from_device, _fifo, _folder])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_refused_at_once(name: str, make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / "named.toml")
    with pytest.raises((InvalidInput, OSError), match=r"device or a pipe|folder|can be read by others"):
        READERS[name](path)


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"trace", "index", "endpoints"}))
def test_a_file_beyond_its_bound_is_not_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "named.toml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match=r"larger than|not a habits file"):
        READERS[name](path)


@pytest.mark.parametrize(
    "command",
    [
        ["constellation", "status", "--plan", "FILE"],
        ["constellation", "up", "--settings", "FILE"],
        ["kv", "get", "x", "--store", "tiers:///FILE"],
        ["route", "--settings", "FILE"],
        ["fit", "--url", "http://127.0.0.1:1", "--shape", "FILE"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
@pytest.mark.timeout(10)
def test_commands_say_what_is_wrong_with_a_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path / "run"))
    path = _fifo(tmp_path / "pipe")
    status = main([word.replace("FILE", str(path)) for word in command])
    said = capsys.readouterr().err
    assert status == 2 and str(path) in said and "expected a regular file" in said


@pytest.mark.parametrize("which", ["certificate", "key"])
@pytest.mark.timeout(10)
def test_a_pipe_is_no_certificate(which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = self_signed()
    parts = {"certificate": pair.chain, "key": pair.key}
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / which).unlink()
    paths = [str(_fifo(tmp_path / which) if name == which else tmp_path / name) for name in parts]
    command = ["store", "serve", "memory", "--listen", f"unix://{tmp_path}/socket"]
    assert main([*command, "--tls-cert", paths[0], "--tls-key", paths[1]]) == 2
    assert "expected a regular file" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="expected a regular file"):
        Certificate.check(Path(paths[0]), Path(paths[1]))


@pytest.mark.timeout(10)
def test_a_pipe_without_another_end_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.2)
    pipe, store = str(_fifo(tmp_path / "pipe")), ["--store", f"disk://{tmp_path / 'values'}?budget=1MiB"]
    (tmp_path / "value").write_bytes(b"value")
    assert main(["kv", "put", pipe, "--key", "a", *store]) == 2
    assert "a pipe, and no data came within 0.2 s" in capsys.readouterr().err
    assert main(["kv", "put", str(tmp_path / "value"), "--key", "a", *store]) == 0
    assert main(["kv", "get", "a", "--out", pipe, *store]) == 2
    assert f"cannot write {pipe}" in capsys.readouterr().err


@pytest.mark.brief()
def test_a_value_may_come_from_a_pipe_but_not_from_an_endless_device(tmp_path: Path) -> None:
    store = ["--store", f"disk://{tmp_path / 'values'}?budget=1MiB"]
    skymemory = [sys.executable, "-m", "skymemory.cli.main", "kv"]
    for source, status in ((tmp_path / "value", 0), (Path("/dev/zero"), 2)):
        if status == 0:
            os.mkfifo(source)
        command = [*skymemory, "put", str(source), "--key", "a", *store]
        put = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if status == 0:
            source.write_bytes(b"through a pipe")
        _, said = put.communicate(timeout=30)
        assert (put.returncode, "device" in said) == (status, status == 2), said


def test_a_file_that_grows_while_it_is_read_is_bounded_too(tmp_path: Path) -> None:
    """The kernel's own files say that they have no bytes, and have many."""
    with pytest.raises(OSError, match="larger than"):
        read_bounded(Path("/proc/self/maps"), 10)
    small = tmp_path / "small"
    small.write_bytes(b"x" * 100)
    assert read_bounded(small, 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than"):
        read_bounded(small, 99)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")
    assert MAX_SETTINGS_BYTES == 1 << 20


def test_what_is_written_privately_is_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    with pytest.raises(FileExistsError):
        write_private(path, "newer", replace=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["settings"] and path.read_text() == "new"


def test_threads_that_write_one_file_each_write_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    failed: list[object] = []

    def write(letter: str) -> None:
        try:
            for _ in range(100):
                write_private(path, letter * 10_000)
                text = path.read_text()
                if len(text) != 10_000 or len(set(text)) != 1:
                    failed.append(text[:9])
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and [entry.name for entry in tmp_path.iterdir()] == ["settings"]
