"""A folder for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)
