"""Which implementation serves: the compiled one where it was built, the twin where it was asked for."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

from skymemory import native
from skymemory.native.twin import backend

NAMES = sorted(set(backend.__all__))


def _asked(value: str) -> str:
    code = "from skymemory import native; print(native.NATIVE, native.crc32.__module__, native.crc32(b'123456789'))"
    environment = os.environ | {"SKYMEMORY_PURE_PYTHON": value}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_environment_forces_the_twin() -> None:
    assert _asked("1") == f"False skymemory.native.twin.backend {0xCBF43926}"


@pytest.mark.brief()
@pytest.mark.skipif(not native.NATIVE, reason="the compiled helper was not built, or the twin was asked for")
def test_the_compiled_helper_serves_by_default() -> None:
    assert _asked("0") == f"True skymemory.native._fast {0xCBF43926}"
    assert _asked("") == _asked("0")


@pytest.mark.parametrize("name", NAMES)
def test_both_offer_the_same_names(name: str) -> None:
    assert callable(getattr(native, name))
    assert inspect.getdoc(getattr(backend, name))
