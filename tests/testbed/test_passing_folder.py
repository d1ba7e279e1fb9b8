"""A demo's folder goes with it, and that of a killed demo with the next one; no other folder ever does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skymemory.testbed.run_directory import PREFIX, RunDirectory, remove_left_behind, temporary_run_directory

LATER_S = 3600.0


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left_by_a_killed_process(parent: Path) -> Path:
    code = (
        "import os, signal\nfrom skymemory.testbed.run_directory import temporary_run_directory\n"
        "with temporary_run_directory() as folder:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=240, check=False)
    (folder,) = parent.glob(f"{PREFIX}*")
    return folder


def test_it_is_gone_at_the_end_with_what_is_in_it(temporary: Path) -> None:
    with pytest.raises(RuntimeError), temporary_run_directory("motion-") as folder:
        (folder / "host.log").write_text("words")
        assert folder.parent == temporary and folder.name.startswith("skymemory-demo-motion-")
        raise RuntimeError
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.seeded
def test_that_of_a_killed_demo_goes_with_the_next(temporary: Path) -> None:
    left = left_by_a_killed_process(temporary)
    old_s = time.time() - LATER_S
    os.utime(left, (old_s, old_s))
    with temporary_run_directory() as folder:
        assert not left.exists() and folder.exists()


def test_what_is_held_young_or_alive_stays(temporary: Path) -> None:
    later_s = time.time() + LATER_S
    with temporary_run_directory() as held:
        assert remove_left_behind(temporary, later_s) == [] and held.exists()
    left = left_by_a_killed_process(temporary)
    assert remove_left_behind(temporary) == [], "another process may have made it just now"
    RunDirectory(left).write_record("host-1", os.getpid())
    assert remove_left_behind(temporary, later_s) == [], "its satellites run"
    RunDirectory(left).forget("host-1")
    assert remove_left_behind(temporary, later_s) == [left]


def test_a_link_and_a_folder_that_is_not_a_demos_stay(temporary: Path) -> None:
    (temporary / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "precious")
    (temporary / f"{PREFIX}mine").mkdir()
    assert remove_left_behind(temporary, time.time() + LATER_S) == []
    assert (temporary / "precious").is_dir() and (temporary / f"{PREFIX}mine").is_dir()
