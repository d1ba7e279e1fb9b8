"""What the set-up says of torch before it downloads it."""

from __future__ import annotations

import pytest
from tools.torch_build import is_cuda


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([("torch", "2.13.0+cpu"), ("sympy", "1.14.0")], False),
        ([("torch", "2.14.1"), ("sympy", "1.14.0")], False),  # macOS
        ([("torch", "2.14.1"), ("nvidia-cublas", "13.1")], True),
        ([("torch", "2.14.1+cu130")], True),
    ],
)
def test_a_cuda_build_is_known_by_its_version_or_its_libraries(packages: list[tuple[str, str]], expected: bool) -> None:
    report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages]}
    assert is_cuda(report) is expected
