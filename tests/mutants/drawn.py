"""Faults that are drawn by rule: by none who wrote the tests, and new ones for each seed.

The rules are those of mutation testing (comparisons, conditions, numbers, steps that are left out), for statements
drawn evenly from the functions of ``FILES``. A fault that changes nothing that can be seen survives, too: of messages
and counters none is made.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import SOURCE, Fault

FILES: dict[str, tuple[str, ...]] = {
    "protocol/auth.py": ("protocol/test_auth.py", "vectors", "transport/test_clock_steps.py"),
    "protocol/congestion.py": ("protocol", "transport/test_simulated_links.py"),
    "protocol/client/liveness.py": ("protocol", "store/sky/test_dead_satellites.py"),
    "protocol/client/requests.py": ("protocol", "store/sky"),
    "protocol/satellite/retention.py": ("protocol/satellite", "store/sky"),
    "store/disk.py": ("store",),
    "store/disk_files.py": ("store",),
    "store/sky/shared_index.py": ("store/sky",),
    "store/redis_server/budget.py": ("store/redis_server",),
    "transport/unix_clock.py": ("transport/test_unix_clock.py", "transport/test_clock_steps.py"),
}
"""Where faults are drawn, below ``src/skymemory``, and what is run for them, below ``tests``."""

_SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_WORDS = ("log.", "warnings.", "print(", "self._counters.add", "self.counters.add")


@dataclass(frozen=True, slots=True)
class _Change:
    """Of the text from ``first`` to ``last``, as offsets."""

    first: int
    last: int
    becomes: str
    rule: str
    place: str
    """Line and column."""


def drawn(tree: Path, number: int, seed: int, only: Sequence[str] = ()) -> list[Fault]:
    """So many faults, or as many as there are; of the files whose names have one of ``only``, if any has."""
    dice, faults = random.Random(seed), []
    files = [name for name in FILES if any(word in name for word in only)] or [*FILES]
    waiting = {name: changes_of((tree / SOURCE / name).read_text("utf-8")) for name in files}
    for changes in waiting.values():
        dice.shuffle(changes)
    while len(faults) < number and any(waiting.values()):
        for name in files:
            if waiting[name] and len(faults) < number:
                faults.append(_fault(tree, name, waiting[name].pop()))
    return faults


def _fault(tree: Path, name: str, change: _Change) -> Fault:
    """The text that it replaces, with as much before and behind it as makes it the only one."""
    text = (tree / SOURCE / name).read_text("utf-8")
    first, last = change.first, change.last
    while text.count(text[first:last]) > 1:
        first = max(0, text.rfind("\n", 0, first))
        last = len(text) if (end := text.find("\n", last)) < 0 else end + 1
    becomes = text[first : change.first] + change.becomes + text[change.last : last]
    tests = tuple(f"tests/{test}" for test in FILES[name])
    what = f"{name}:{change.place}: {change.rule}: {text[change.first : change.last]!r} -> {change.becomes!r}"
    return Fault("drawn", what, SOURCE / name, text[first:last], becomes, tests)


def changes_of(text: str) -> list[_Change]:
    """All changes that the rules make, each once."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    found: dict[tuple[int, int, str], _Change] = {}
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in function.body:
            for node in _without_words(statement):
                for (first, last), becomes, rule in _changed(node, span, text):
                    if text[first:last] != becomes:
                        found[first, last, becomes] = _Change(
                            first, last, becomes, rule, f"{node.lineno}:{node.col_offset + 1}"
                        )
    return list(found.values())


def _without_words(statement: ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """Its nodes, but for messages, logs and counters, which no test holds to the letter."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.arguments) or _is_words(node):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        waiting += ast.iter_child_nodes(node)


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith(_WORDS)
    )


def _changed(node: ast.expr | ast.stmt, span, text: str) -> Iterator[tuple[tuple[int, int], str, str]]:  # type: ignore[no-untyped-def]
    """What becomes what, and by which rule."""

    def of(one: ast.expr) -> str:
        first, last = span(one)
        return f"({text[first:last]})" if isinstance(one, ast.NamedExpr) else text[first:last]

    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _SWAPPED:
            yield span(node), f"{of(left)} {_SWAPPED[type(operator)]} {of(right)}", "comparison"
        case ast.BoolOp(operator, [first, *others]):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield span(node), word.join(f"({of(each)})" for each in (first, *others)), "and, or"
            yield span(node), of(others[-1]), "a condition less"
        case ast.UnaryOp(ast.Not(), operand):
            yield span(node), f"bool({of(operand)})", "not"
        case ast.If(test) | ast.While(test) if not isinstance(test, ast.Constant):
            yield span(test), "False", "never"
            if isinstance(node, ast.If):
                yield span(test), "True", "always"
        case ast.Constant(bool() as value):
            yield span(node), str(not value), "truth"
        case ast.Constant(int() as value):
            yield span(node), str(value + 1), "number"
        case ast.BinOp(left, ast.Add() | ast.Sub() as operator, right) if not _is_text(left, right):
            yield span(node), f"{of(left)} {'-' if isinstance(operator, ast.Add) else '+'} {of(right)}", "sign"
        case ast.Call(ast.Name("min" | "max" as name) as called):
            yield span(called), "max" if name == "min" else "min", "min, max"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete():
            yield span(node), "pass", "a step less"


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) for node in nodes)
