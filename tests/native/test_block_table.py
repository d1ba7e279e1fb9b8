"""The table of blocks, compiled and twin: equal answers to whatever is done, and a naive account of what is there."""

from __future__ import annotations

import math
import struct
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.native.conftest import IMPLEMENTATIONS

from skymemory.index.journal import Record, RecordOp, encode_record
from skymemory.index.radix import BlockInfo

ROW = struct.Struct("<IQIdiiI")
BRANCHES, DEPTH = 3, 5


def key(branch: int, depth: int) -> bytes:
    """Two branches share their first two blocks; the keys of one depth begin alike, and share their slot."""
    return bytes([depth, min(branch, 0 if depth < 2 else branch)]) + bytes(30)


def row(group: int, size_bytes: int = 10) -> bytes:
    return ROW.pack(1, size_bytes, 7, 1.5, -1, 2, group)


places = st.integers(0, BRANCHES - 1), st.integers(0, DEPTH), st.integers(0, DEPTH)


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [module.BlockTable() for module in IMPLEMENTATIONS]
        self.there: dict[bytes, tuple[int, bytes | None, bytes]] = {}

    def all_say(self, call):
        first, *others = [call(table) for table in self.tables]
        assert all(other == first for other in others)
        return first

    @rule(branch=places[0], one=places[1], other=places[2], group=st.integers(0, 3), skewed=st.integers(0, 8))
    def enter(self, branch: int, one: int, other: int, group: int, skewed: int) -> None:
        """Blocks of a branch; sometimes at another depth, or behind a parent of another branch."""
        first, last = min(one, other), max(one, other)
        keys = [key(branch, depth) for depth in range(first, last)]
        rows = [row(group + at % 2, 3 * at) for at in range(len(keys))]
        start = first + (skewed == 0)
        parent = key((branch + (skewed == 1)) % BRANCHES, first - 1) if first else None
        if skewed == 2 and keys:
            keys[-1] = keys[0]
        new = self.all_say(lambda table: table.enter(b"".join(keys), b"".join(rows), start, parent))
        if new is not None:
            before = len(self.there)
            for at, one_key in enumerate(keys):
                self.there[one_key] = start + at, keys[at - 1] if at else parent, rows[at]
            assert new == len(self.there) - before

    @rule(branch=places[0], depth=places[1])
    def remove(self, branch: int, depth: int) -> None:
        gone = self.there.pop(key(branch, depth), None) is not None
        assert self.all_say(lambda table: table.remove(key(branch, depth))) is gone

    @rule(size=st.sampled_from([math.inf, 20.0]))
    def resize(self, size: float) -> None:
        for table in self.tables:
            table.capacity_bytes = size
        assert self.all_say(lambda table: table.capacity_bytes) == size

    @rule(branch=places[0], data=st.binary(max_size=3))
    def replay(self, branch: int, data: bytes) -> None:
        infos = [BlockInfo(1, 5, 7, 1.0, 0, 0, "hop", servers) for servers in (1, 2, 2)]
        keys = [key(branch, depth) for depth in range(3)]
        log = (
            encode_record(Record(RecordOp.ADD, keys, infos)) + encode_record(Record(RecordOp.REMOVE, [keys[1]])) + data
        )
        asked = []

        def numbers_of(packed: bytes, count: int, sized: bool) -> list[int]:
            asked.append((count, sized))
            return [7, 5]

        added = all(self.there.get(one, (at, keys[at - 1] if at else None))[:2] for at, one in enumerate(keys))
        taken = self.all_say(lambda table: table.replay(log, 0, numbers_of))
        assert added and asked == [(2, False)] * len(self.tables)
        if taken:
            assert taken == len(log) - len(data)
            for at, one_key in enumerate(keys):
                self.there[one_key] = at, keys[at - 1] if at else None, ROW.pack(1, 5, 7, 1.0, 0, 0, 5 if at else 7)
            del self.there[keys[1]]

    @rule()
    def clear(self) -> None:
        self.there.clear()
        for table in self.tables:
            table.clear()

    @invariant()
    def all_is_known(self) -> None:
        every = [key(branch, depth) for branch in range(BRANCHES) for depth in range(DEPTH)]
        rows = [self.there[one][2] if one in self.there else None for one in every]
        assert self.all_say(lambda table: table.find(every)) == rows
        assert self.all_say(len) == len(self.there)
        assert self.all_say(lambda table: [table.place(one) for one in every]) == [
            self.there[one][:2] if one in self.there else None for one in every
        ]
        behind = {above: depth for depth, above, _ in self.there.values() if above not in self.there}
        assert self.all_say(lambda table: [table.below(one) for one in every]) == [behind.get(one) for one in every]
        for at in range(len(every)):
            absent = next((n for n, one in enumerate(every[at:]) if one not in self.there), len(every) - at)
            assert self.all_say(lambda table, at=at: table.leading(every[at:])) == absent
        items = sorted((one, depth, ROW.unpack(its)[-1]) for one, (depth, _, its) in self.there.items())
        assert self.all_say(lambda table: sorted(table.items())) == items
        held = [table.group_bytes() for table in self.tables]
        assert all(its == pytest.approx(held[0], rel=1e-12) for its in held)

    @invariant()
    def runs_hold_all(self) -> None:
        for table in self.tables:
            found, runs = {}, 0

            def visit(start: int, parent: bytes | None, hashes: bytes, rows: bytes, groups: list[int]) -> None:
                nonlocal runs
                runs += 1
                assert len(set(groups)) == len(groups)
                for at in range(len(hashes) // 32):
                    *rest, place = ROW.unpack(rows[at * 36 : at * 36 + 36])
                    one = hashes[at * 32 : at * 32 + 32]
                    found[one] = start + at, parent, ROW.pack(*rest, groups[place])  # noqa: B023
                    parent = one

            table.runs(visit)
            assert found == self.there
            followed = {above for _, above, _ in self.there.values() if above in self.there}
            assert runs == len(self.there) - len(followed), "as few as can be"


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def table(request: pytest.FixtureRequest):
    return request.param.BlockTable()


@pytest.mark.parametrize(
    ("hashes", "rows", "start", "parent"),
    [
        (bytes(31), row(0), 0, None),
        (bytes(32), row(0)[:-1], 0, None),
        (bytes(64), row(0), 0, None),
        (bytes(32), row(0), 1, b"short"),
        (bytes(32), row(0), 1, "text"),
        (bytes(32), row(1 << 24), 0, None),
    ],
)
def test_what_is_no_chain_is_refused(table, hashes: bytes, rows: bytes, start: int, parent: object) -> None:
    with pytest.raises(ValueError, match=r"expected|must be|beyond"):
        table.enter(hashes, rows, start, parent)
    assert len(table) == 0


def test_keys_that_are_none_are_absent(table) -> None:
    table.enter(bytes(32), row(0), 0, None)
    strange = [b"", bytes(31), bytes(33), "x", 5, None]
    assert table.find([*strange, bytes(32)]) == [None] * 6 + [row(0)]
    assert [table.place(one) or table.below(one) or table.remove(one) for one in strange] == [False] * 6
    assert table.leading([bytes(32), bytes(31)]) == 1


@pytest.mark.parametrize("start", [-1, 2**32 - 1, 2**32, 2**70])
def test_no_chain_is_deeper_than_the_wire_can_say(table, start: int) -> None:
    assert table.enter(bytes(32), row(0), start, b"p" * 32) is None
    assert table.enter(bytes(32), row(0), 2**32 - 2, b"p" * 32) == 1


@pytest.mark.parametrize("at", [-1, 3])
def test_replay_begins_inside(table, at: int) -> None:
    with pytest.raises(ValueError, match="records from byte"):
        table.replay(b"ab", at, lambda *_: [])


@pytest.mark.parametrize("given", [None, [1 << 24], [-1], ["x"], [2**40]])
def test_numbers_that_are_none_are_an_error(given: object) -> None:
    record = encode_record(Record(RecordOp.ADD, [bytes(32)], [BlockInfo(1, 5, 7, 1.0, 0, 0, "hop", 3)]))
    for module in IMPLEMENTATIONS:
        table = module.BlockTable()
        with pytest.raises((TypeError, ValueError, OverflowError, struct.error)):
            table.replay(record, 0, lambda *_: given)
        assert len(table) == 0


def test_many_blocks_come_and_go_in_the_same_memory() -> None:
    for module in IMPLEMENTATIONS[-1:]:
        table, size = module.BlockTable(), 0
        for turn in range(5):
            keys = [struct.pack("<QQ16x", turn, at) for at in range(20_000)]
            assert table.enter(b"".join(keys), row(0) * len(keys), 0, None) == len(keys)
            assert table.leading(keys) == len(keys)
            for one in keys[::2] + keys[1::2]:
                assert table.remove(one)
            assert len(table) == 0 and table.group_bytes() == [0.0]
            size = size or sys.getsizeof(table)
            assert sys.getsizeof(table) == size


def test_a_table_must_not_change_while_its_runs_are_visited(table) -> None:
    table.enter(bytes(32) + b"x" * 32, row(0) * 2, 0, None)
    table.enter(b"y" * 32, row(0), 0, None)
    with pytest.raises(RuntimeError):
        table.runs(lambda *_: table.enter(b"z" * 32, row(0), 0, None))
