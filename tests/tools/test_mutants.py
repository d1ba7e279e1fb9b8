"""The list of seeded faults fits the code: each can be made, and names tests that are there."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mutants.drawn import changes_of, drawn
from tests.mutants.faults import BadList, check, load

ROOT = Path(__file__).parents[2]


def test_every_seeded_fault_can_be_made() -> None:
    faults = load()
    check(faults, ROOT)
    for wrong in ({"was": "no such text"}, {"tests": ("tests/no_such_test.py",)}, {"tests": ()}):
        with pytest.raises(BadList):
            check([replace(faults[0], **wrong)], ROOT)


@pytest.mark.brief()
@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_faults_can_be_made_and_are_code(seed: int) -> None:
    faults = drawn(ROOT, 300, seed)
    check(faults, ROOT)
    assert len(faults) == 300 and faults == drawn(ROOT, 300, seed)
    for fault in faults:
        ast.parse(fault.applied_to((ROOT / fault.file).read_text("utf-8")))


def test_every_rule_is_used() -> None:
    source = """
def all_of_them(self, a, b):
    if not a and b:
        self.step()
    while a < b:
        a += min(a - b, 3)
    log.warning("words %d", 3)
    return True
"""
    made = {(change.rule, change.becomes) for change in changes_of(source)}
    assert made == {
        ("a condition less", "b"),
        ("a step less", "pass"),
        ("always", "True"),
        ("and, or", "(not a) or (b)"),
        ("comparison", "a <= b"),
        ("min, max", "max"),
        ("never", "False"),
        ("not", "bool(a)"),
        ("number", "4"),
        ("sign", "a + b"),
        ("truth", "False"),
    }
