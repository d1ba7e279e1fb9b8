"""RadixIndex against a naive twin: adds, removals, holes, branches, snapshots and replayed journals in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.records import records_of

from skymemory.index.journal import JournalState, Record, RecordOp, encode_record, replay_all
from skymemory.index.radix import BlockInfo, RadixIndex
from skymemory.kv.block import hash_blocks
from skymemory.store.sky.shared_index import SharedIndex

DEPTH = 6
PROMPTS = [
    hash_blocks(bytes(32), [n >> at & 1 for at in range(DEPTH)], 1) for n in range(2**DEPTH)
]  # every path of a binary tree: 126 blocks
CONTEXTS = (b"", b"one", b"two")


@dataclass
class NaiveIndex:
    """One lookup per block."""

    infos: dict[bytes, BlockInfo] = field(default_factory=dict)

    def longest_prefix(self, hashes: list[bytes]) -> int:
        for at, block_hash in enumerate(hashes):
            if block_hash not in self.infos:
                return at
        return len(hashes)

    def bytes_by_servers(self) -> dict[int, int]:
        return {
            servers: sum(info.value_bytes for info in self.infos.values() if info.servers == servers)
            for servers in {info.servers for info in self.infos.values()}
        }


STEPS = st.one_of(
    st.tuples(
        st.just("add"), st.integers(0, 2**DEPTH - 1), st.integers(0, DEPTH), st.integers(0, DEPTH), st.integers(0, 2)
    ),
    st.tuples(st.just("remove"), st.integers(0, 2**DEPTH - 1), st.integers(0, DEPTH - 1)),
    st.tuples(st.just("remove context"), st.integers(0, 2)),
    st.tuples(st.just("restore")),
    st.tuples(st.just("ask"), st.integers(0, 2**DEPTH - 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_same_as_the_naive_twin(steps: list[tuple[object, ...]]) -> None:
    index, naive, log = RadixIndex(), NaiveIndex(), bytearray()
    for number, step in enumerate(steps):
        match step:
            case ("add", int(prompt), int(first), int(last), int(context)):
                hashes = PROMPTS[prompt][min(first, last) : max(first, last)]
                start = min(first, last) if hashes else 0
                parent = PROMPTS[prompt][start - 1] if start else None
                infos = [
                    BlockInfo(number, at + 1, at, 0.5, -at, at, "hop", 1 + (number + at) % 3, CONTEXTS[context])
                    for at in range(len(hashes))
                ]
                new = index.add(hashes, infos, start, parent)
                assert new == len(set(hashes) - set(naive.infos))
                naive.infos.update(zip(hashes, infos, strict=True))
                log += encode_record(Record(RecordOp.ADD, hashes, infos, start=start, parent=parent))
            case ("remove", int(prompt), int(at)):
                block_hash = PROMPTS[prompt][at]
                assert index.remove(block_hash) == (naive.infos.pop(block_hash, None) is not None)
                log += encode_record(Record(RecordOp.REMOVE, [block_hash]))
            case ("remove context", int(context)):
                gone = {one for one, info in naive.infos.items() if info.context == CONTEXTS[context]}
                assert set(index.remove_context(CONTEXTS[context])) == gone
                for block_hash in gone:
                    del naive.infos[block_hash]
                log += encode_record(Record(RecordOp.REMOVE_CONTEXT, context=CONTEXTS[context]))
            case ("restore",):
                index, old = RadixIndex(), index
                replay_all(b"".join(records_of(old)), index, JournalState())
            case ("ask", int(prompt)):
                assert index.longest_prefix(PROMPTS[prompt]) == naive.longest_prefix(PROMPTS[prompt])
    replayed = RadixIndex()
    assert replay_all(log, replayed, JournalState()) == len(log)
    for one in (index, replayed):
        assert len(one) == len(naive.infos)
        assert {block_hash: one.get(block_hash) for block_hash in one} == naive.infos
        held = one.bytes_by_servers()
        assert {servers: its for servers, its in held.items() if its} == naive.bytes_by_servers()
        for hashes in PROMPTS:
            assert one.longest_prefix(hashes) == naive.longest_prefix(hashes)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, DEPTH), st.booleans()), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 2**DEPTH * DEPTH - 1), max_size=DEPTH), min_size=1, max_size=6),
)
def test_any_keys_in_any_order_count_up_to_the_first_that_is_absent(
    changes: list[tuple[int, int, bool]], jumbles: list[list[int]]
) -> None:
    shared, naive = SharedIndex(), NaiveIndex()
    info = BlockInfo(1, 1, 1, 1.0, 0, 0, "hop", 9)
    for prompt, blocks, there in changes:
        if there:
            shared.add(PROMPTS[prompt][:blocks], [info] * blocks, 0, None)
            naive.infos.update(dict.fromkeys(PROMPTS[prompt][:blocks], info))
        else:
            shared.remove(PROMPTS[prompt][blocks:])
            for block_hash in PROMPTS[prompt][blocks:]:
                naive.infos.pop(block_hash, None)
    every = [block_hash for prompt in PROMPTS for block_hash in prompt]
    asked = [[every[at] for at in jumble] for jumble in jumbles]
    for prompt, _, _ in changes:  # a prompt of which one key is another's
        for at, foreign in enumerate(asked[0]):
            asked.append([*PROMPTS[prompt][:at], foreign, *PROMPTS[prompt][at + 1 :]])
    for keys in asked:
        assert shared.longest_prefix(keys) == naive.longest_prefix(keys)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 59), max_size=12), st.integers(0, 60), st.booleans())
def test_long_prompts_with_holes(holes: set[int], cut: int, fill: bool) -> None:
    hashes = hash_blocks(bytes(32), list(range(60)), 1)
    other = hash_blocks(bytes(32), [1000, *range(60)], 1)
    info = BlockInfo(1, 1, 1, 1.0, 0, 0, "hop", 9)
    index = RadixIndex()
    index.add(hashes, [info] * 60)
    for hole in holes:
        index.remove(hashes[hole])
    expected = min([*holes, cut])
    assert index.longest_prefix(hashes[:cut] + other[: 60 - cut]) == expected
    if fill:
        for hole in holes:
            index.add([hashes[hole]], [info], hole, hashes[hole - 1] if hole else None)
        assert index.longest_prefix(hashes) == 60
        assert len(records_of(index)) == 1
