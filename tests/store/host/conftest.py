"""Folders in shared memory for host arenas."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("/dev/shm is not here")
    made = Path(tempfile.mkdtemp(prefix="skymemory-test-", dir=shared))
    yield made
    shutil.rmtree(made)
