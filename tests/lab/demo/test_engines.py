"""The environment of vLLM and the memory that a demo is given, looked at before anything is started."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skymemory import open_store
from skymemory.errors import InvalidInput
from skymemory_lab.demo.engines import python_of_vllm, shared_memory


@pytest.mark.parametrize(
    ("given", "lacking"),
    [("nowhere/python", "no such file"), ("/bin/sh", "is no Python that runs"), (sys.executable, "has no vllm")],
)
def test_what_it_lacks_is_said(given: str, lacking: str) -> None:
    assert importlib.util.find_spec("vllm") is None
    with pytest.raises(InvalidInput, match=f"--python {given}: {lacking}.* makes an environment with vLLM.*; or not"):
        python_of_vllm(Path(given), "; or not")


def test_one_that_has_both_is_taken(tmp_path: Path) -> None:
    for name in ("vllm", "openai"):
        (tmp_path / f"{name}.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    assert python_of_vllm(python) == python


@pytest.mark.parametrize(("free_mib", "taken_mib"), [(320, 48), (1000, 256)])
def test_the_store_in_shared_memory_is_as_large_as_fits(
    free_mib: int, taken_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_mib << 8, f_frsize=4096))
    with shared_memory(tmp_path) as address:
        assert address.startswith(f"host://{taken_mib}MiB?at={tmp_path}/")
        with open_store(address):
            files_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        assert taken_mib << 20 < files_bytes < free_mib << 20
    assert not list(tmp_path.iterdir())


def test_too_little_shared_memory_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=64 << 8, f_frsize=4096))
    with pytest.raises(InvalidInput, match=r"64.0 MiB of shared memory are free.*--shm-size.*host://256MiB\?at="):
        shared_memory(tmp_path).__enter__()
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match=r"No such file.*or give --store"):
        shared_memory(tmp_path / "nowhere").__enter__()
