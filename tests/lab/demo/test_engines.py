"""The environment of vLLM that a demo is given, looked at before anything is started."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from skymemory.errors import InvalidInput
from skymemory_lab.demo.engines import python_of_vllm


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
