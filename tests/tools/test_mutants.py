"""The list of seeded faults fits the code: each can be made, and names tests that are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants.faults import BadList, check, load

ROOT = Path(__file__).parents[2]


def test_every_seeded_fault_can_be_made() -> None:
    faults = load()
    check(faults, ROOT)
    for wrong in ({"was": "no such text"}, {"tests": ("tests/no_such_test.py",)}, {"tests": ()}):
        with pytest.raises(BadList):
            check([replace(faults[0], **wrong)], ROOT)
