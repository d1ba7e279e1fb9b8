"""The compiled side of a host arena, judged by a dict; and read by other processes while it is changed."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import tempfile
import threading
import time
import zlib
from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.contract.forked import in_child

from skymemory import native
from skymemory.store.host.extents import Extents, rounded
from skymemory.store.host.layout import CHECKED

if native._fast is None:
    pytest.skip("the compiled helper was not built", allow_module_level=True)

ENTRIES, BUCKETS, VALUES_BYTES = 8, 32, 1 << 16
KEYS = [bytes([number]) * 32 for number in range(12)]


def directory_of(
    entries: int = ENTRIES, buckets: int = BUCKETS, values_bytes: int = VALUES_BYTES, seed: int = 3
) -> mmap.mmap:
    made = mmap.mmap(-1, 4096 + 4 * buckets + 72 * entries)
    struct.pack_into("<8sQQQQQ16sQ", made, 0, b"SKYHOST2", values_bytes, entries, buckets, seed, 0, bytes(16), 0)
    return made


def page_of(holds: int = 4, uses: int = 4, slots: int = 0) -> tuple[int, mmap.mmap]:
    """A client's page: a descriptor for it, and the owner's mapping."""
    with tempfile.TemporaryFile() as file:
        file.write(struct.pack("<8sQQQQQ", b"HSKPAGE2", holds, uses, 0, 0, slots))
        file.truncate(4096 + -(-8 * (holds + uses) // 64) * 64 + 128 * slots)
        file.flush()
        return os.dup(file.fileno()), mmap.mmap(file.fileno(), 0)


class DirectoryMachine(RuleBasedStateMachine):
    """What the directory and a reader of it say, and what a dict does."""

    @initialize(seed=st.integers(0, 2**64 - 1))
    def begin(self, seed: int) -> None:
        self.memory = directory_of(seed=seed)
        self.directory = native.HostDirectory(self.memory)
        fd, self.page = page_of()
        self.reader = native.HostReader(self.memory, mmap.mmap(-1, VALUES_BYTES), fd)
        self.twin: dict[bytes, tuple[int, int, int, int]] = {}
        self.views: list[native.HostView] = []
        self.uses: list[int] = []

    @rule(
        key=st.sampled_from(KEYS),
        offset=st.integers(0, 900),
        size=st.integers(0, 2_000),
        check=st.integers(0, 2**32 - 1),
    )
    def put(self, key: bytes, offset: int, size: int, check: int) -> None:
        # Replaced values keep their entry until the new one has its own.
        expected = len(self.twin) < ENTRIES
        assert self.directory.put(key, 64 * offset, size, check) == expected
        if expected:
            self.twin[key] = (64 * offset, size, check, 0)

    @rule(key=st.sampled_from(KEYS))
    def take(self, key: bytes) -> None:
        assert self.directory.take(key) == (self.twin.pop(key, None) is not None)

    @rule(key=st.sampled_from(KEYS), shift=st.sampled_from([0, 64]))
    def mark_checked(self, key: bytes, shift: int) -> None:
        offset, size, check, end_ns = self.twin.get(key, (0, 0, 0, 0))
        assert self.directory.mark_checked(key, offset + shift) == (key in self.twin and not shift)
        if key in self.twin and not shift:
            self.twin[key] = (offset, size, check | CHECKED, end_ns)

    @rule(key=st.sampled_from(KEYS), shift=st.sampled_from([0, 64]), end_ns=st.sampled_from([0, 1, 1 << 62]))
    def set_end(self, key: bytes, shift: int, end_ns: int) -> None:
        offset, size, check, _ = self.twin.get(key, (0, 0, 0, 0))
        assert self.directory.set_end(key, offset + shift, end_ns) == (key in self.twin and not shift)
        if key in self.twin and not shift:
            self.twin[key] = (offset, size, check, end_ns)

    def living(self, key: bytes) -> bool:
        return key in self.twin and self.twin[key][3] != 1

    @rule()
    def restart(self) -> None:
        epoch = self.reader.epoch
        self.directory = native.HostDirectory(self.memory)
        assert self.reader.epoch == epoch + 1
        self.twin = {key: (offset, size, check & ~CHECKED, end) for key, (offset, size, check, end) in self.twin.items()}

    @rule(key=st.sampled_from(KEYS))
    def hold(self, key: bytes) -> None:
        (view,) = self.reader.hold([key])
        if len(self.views) == 4:
            assert view is False
        elif not self.living(key):
            assert view is None
        else:
            offset, size, check, _ = self.twin[key]
            assert isinstance(view, native.HostView)
            assert (view.offset, len(memoryview(view)), view.crc) == (offset, size, check & (CHECKED - 1))
            assert view.checked == bool(check & CHECKED)
            self.views.append(view)
            self.uses.append(offset)

    @rule(which=st.integers(0, 3))
    def let_go(self, which: int) -> None:
        if which < len(self.views):
            del self.views[which]

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "twin"):
            return
        assert self.reader.sizes(KEYS) == [self.twin[key][1] if self.living(key) else None for key in KEYS]
        assert self.reader.prefix(KEYS) == next((at for at, key in enumerate(KEYS) if not self.living(key)), len(KEYS))
        found = [(key, offset, size, check & (2 * CHECKED - 1), end) for key, offset, size, check, end in self.directory.entries()]
        assert sorted(found) == sorted((key, *rest) for key, rest in self.twin.items())
        assert self.directory.held_offsets([self.page]) == {view.offset for view in self.views}
        assert self.reader.held == len(self.views)
        count, last = self.directory.uses(self.page, 0)
        assert count == len(self.uses) and last == self.uses[-4:]


DirectoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDirectory = DirectoryMachine.TestCase


def test_a_half_made_change_is_dropped_by_the_next_owner() -> None:
    memory = directory_of()
    owner = native.HostDirectory(memory)
    for number in range(4):
        assert owner.put(KEYS[number], 64 * number, 10, 7)
    entries_at = 4096 + 4 * BUCKETS
    for at in range(ENTRIES):  # the entry of the first key is being written, as its owner ends
        version, key = struct.unpack_from("<Q32s", memory, entries_at + 64 * at)
        if key == KEYS[0]:
            struct.pack_into("<Q", memory, entries_at + 64 * at, version | 1)
    struct.pack_into("<Q", memory, 40, 7)  # and buckets were being moved
    successor = native.HostDirectory(memory)
    assert sorted(entry[0] for entry in successor.entries()) == KEYS[1:4]
    fd, _ = page_of()
    assert native.HostReader(memory, mmap.mmap(-1, VALUES_BYTES), fd).sizes(KEYS[:5]) == [None, 10, 10, 10, None]


@pytest.mark.parametrize("at", range(0, 56, 8))
def test_a_directory_or_page_of_another_release_is_refused(fast: ModuleType, at: int) -> None:
    memory = directory_of()
    if at in (0, 16, 24):  # magic, entries, buckets
        struct.pack_into("<Q", memory, at, 2**40)
        with pytest.raises(ValueError, match="another release"):
            fast.HostDirectory(memory)
    with tempfile.TemporaryFile() as file, pytest.raises(ValueError, match="page"):
        file.write(struct.pack("<8sQQQQ", b"HSKPAGE1", 4, 4, 0, 0).ljust(8192, b"\0"))
        file.flush()
        fast.HostReader(directory_of(), mmap.mmap(-1, VALUES_BYTES), file.fileno())


@pytest.mark.parametrize("seconds", [0.7, pytest.param(20.0, marks=pytest.mark.slow)])
def test_no_reader_sees_a_torn_entry_or_another_value_while_the_owner_changes_all(seconds: float) -> None:
    """The value of key n is n's letter. Sizes and places change all the time; freed room is written over at once."""
    keys = [bytes([number]) * 32 for number in range(40)]
    memory, values = directory_of(64, 256, 1 << 20), mmap.mmap(-1, 1 << 20)
    owner = native.HostDirectory(memory)
    fd, page = page_of(8, 8)
    until_s = time.monotonic() + seconds

    def read() -> list[int]:
        reader = native.HostReader(memory, values, fd)
        wrong = seen = 0
        dice = random.Random(1)
        while time.monotonic() < until_s:
            key = dice.choice(keys)
            for view in reader.hold([key]):
                if view:
                    seen += 1
                    data = bytes(view)
                    time.sleep(0)
                    wrong += set(data) - {key[0]} != set() or bytes(view) != data
        return [wrong, seen]

    free, places, quarantined = Extents(1 << 20), dict[bytes, tuple[int, int]](), list[tuple[int, int]]()
    dice = random.Random(2)

    def change() -> None:
        for _ in range(50):
            key, size = dice.choice(keys), dice.randrange(1, 9_000)
            old = places.pop(key, None)
            if dice.random() < 0.3:
                assert owner.take(key) == (old is not None)
            elif (offset := free.allocate(rounded(size))) is not None:
                values[offset : offset + size] = key[:1] * size
                assert owner.put(key, offset, size, 0)
                places[key] = (offset, size)
            elif old is not None:
                places[key] = old
                old = None
            if old is not None:
                quarantined.append(old)
            held = owner.held_offsets([page])
            for place in [place for place in quarantined if place[0] not in held]:
                quarantined.remove(place)
                values[place[0] : place[0] + place[1]] = b"\xff" * place[1]
                free.free(place[0], rounded(place[1]))

    wrong, seen = in_child(read, change, limit_s=60)
    assert wrong == 0 and seen > 100


def test_room_that_an_owner_before_gave_out_is_not_written_any_more() -> None:
    memory, values = directory_of(), mmap.mmap(-1, VALUES_BYTES)
    native.HostDirectory(memory)
    fd, page = page_of()
    reader = native.HostReader(memory, values, fd)
    grant = reader.grant
    assert reader.write(64, b"abc", grant) == zlib.crc32(b"abc") and values[64:67] == b"abc"
    reader.renew()
    assert reader.write(64, b"xyz", grant) is None and values[64:67] == b"abc", "another connection"
    grant = reader.grant
    successor = native.HostDirectory(memory)
    assert reader.write(64, b"xyz", grant) is None and values[64:67] == b"abc", "another owner"
    assert reader.write(64, bytes(20_000), reader.grant) == zlib.crc32(bytes(20_000)) and reader.held == 0
    assert successor.held_offsets([page]) == set()
    with pytest.raises(ValueError, match="beyond the arena"):
        reader.write(VALUES_BYTES - 1, b"ab", reader.grant)


def test_room_is_held_while_it_is_referenced_and_void_once_it_is_given_out_again() -> None:
    memory, values = directory_of(), mmap.mmap(-1, VALUES_BYTES)
    owner = native.HostDirectory(memory)
    fd, page = page_of(2)
    reader = native.HostReader(memory, values, fd)
    grant = reader.grant
    room, other = reader.room(64, 3, grant), reader.room(128, 20_000, grant)
    assert room is not None and other is not None and reader.room(256, 1, grant) is None, "all holds are in use"
    view = memoryview(room)
    view[:] = b"abc"
    assert values[64:67] == b"abc" and room.crc(None) == zlib.crc32(b"abc") and len(memoryview(other)) == 20_000
    del room, other
    assert owner.held_offsets([page]) == {64}, "by its view"
    reader.renew()
    assert reader.room(128, 3, grant) is None and reader.held == 1
    assert view.obj.crc(None) is None  # type: ignore[attr-defined]
    del view
    assert owner.held_offsets([page]) == set() and reader.held == 0
    with pytest.raises(ValueError, match="beyond the arena"):
        reader.room(VALUES_BYTES - 1, 2, reader.grant)
    assert reader.room(VALUES_BYTES, 0, reader.grant) is not None


def test_a_forked_childs_copy_of_a_view_ends_no_hold_of_the_parent() -> None:
    memory = directory_of()
    owner = native.HostDirectory(memory)
    owner.put(KEYS[0], 128, 10, 0)
    fd, page = page_of()
    views = native.HostReader(memory, mmap.mmap(-1, VALUES_BYTES), fd).hold([KEYS[0]])

    def drop() -> str:
        views.clear()
        return "dropped"

    assert in_child(drop) == "dropped"
    assert owner.held_offsets([page]) == {128} and len(views) == 1
    views.clear()
    assert owner.held_offsets([page]) == set()


def test_a_reader_that_is_stopped_anywhere_sees_each_value_whole_or_not_at_all() -> None:
    """Between any two of its instructions the owner takes values away, and gives their entries and room to others."""
    memory, values = directory_of(24, 32, 1 << 20), mmap.mmap(-1, 1 << 20)
    owner = native.HostDirectory(memory)
    fd, page = page_of(8_192, 8)
    keys = [bytes([number]) * 32 for number in range(24)]
    sizes = {key: 10 + key[0] for key in keys}
    steady, changing = keys[0], keys[1:]
    free = Extents(1 << 20)
    places: dict[bytes, int] = {}

    def put(key: bytes) -> None:
        offset = free.allocate(4096)
        assert offset is not None
        values[offset : offset + 4096] = key[:1] * 4096
        if owner.put(key, offset, sizes[key], 0):
            places[key] = offset
        else:
            free.free(offset, 4096)

    for key in keys[:20]:
        put(key)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            reader = native.HostReader(memory, values, fd)
            whole = [key[:1] * sizes[key] for key in changing]
            dice, wrong, until_s = random.Random(1), list[str](), time.monotonic() + 30
            os.write(writing, b"ready\n")
            while not wrong and time.monotonic() < until_s:
                if set(reader.sizes([steady] * 4_000)) != {sizes[steady]}:
                    wrong.append("what is there was not found")
                key = dice.choice(changing)
                if not set(reader.sizes([key] * 2_000)) <= {None, sizes[key]}:
                    wrong.append("the size is another value's")
                for _ in range(300):
                    views = reader.hold(changing)
                    if any(view and bytes(view) != whole[at] for at, view in enumerate(views)):
                        wrong.append("the bytes are another value's")
                    views.clear()
            os.write(writing, "".join(wrong[:1]).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(1)
    os.close(writing)
    dice, quarantined = random.Random(2), list[int]()
    try:
        assert os.read(reading, 6) == b"ready\n"
        for _ in range(1_500):
            time.sleep(dice.random() * 3e-4)
            os.kill(child, signal.SIGSTOP)
            stopped = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if stopped is None or stopped.si_code != os.CLD_STOPPED:
                break  # it has seen what is wrong
            for key in [steady, *dice.sample(changing, 16)]:
                offset = places.pop(key, None)
                assert owner.take(key) == (offset is not None)
                if offset is not None:
                    quarantined.append(offset)
            held = owner.held_offsets([page])
            for offset in [offset for offset in quarantined if offset not in held]:
                quarantined.remove(offset)
                values[offset : offset + 4096] = b"\xff" * 4096
                free.free(offset, 4096)
            for key in [*dice.sample(changing, 18), steady]:
                if key not in places:
                    put(key)
            os.kill(child, signal.SIGCONT)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = os.read(reading, 100).decode()
    os.close(reading)
    assert said == ""


def test_room_that_would_arise_is_counted_as_by_freeing() -> None:
    dice = random.Random(5)
    for _ in range(300):
        used = sorted({(at * 4_096, 4_096 * dice.randint(1, 2)) for at in range(0, 40, 2) if dice.random() < 0.8})
        size = dice.choice([64, 4_096, 5_000, 70_000, 100_000])
        order = dice.sample(used, len(used))
        free = Extents(48 * 4_096, used)
        counted = free.count_until_room(rounded(size), order)
        if free.has_room(rounded(size)):
            continue
        freed = 0
        for begin, size_bytes in order:
            free.free(begin, size_bytes)
            freed += 1
            if free.has_room(rounded(size)):
                break
        else:
            freed = -1
        assert counted == (None if freed < 0 else freed)


def test_a_value_in_a_slot_is_read_by_its_writer_until_the_owner_has_entered_it() -> None:
    memory, values = directory_of(), mmap.mmap(-1, VALUES_BYTES)
    owner, (fd, page) = native.HostDirectory(memory), page_of(slots=3)
    reader = native.HostReader(memory, values, fd)
    assert reader.store(KEYS[0], b"abc", 0, 0, None) == 0 and not owner.posted([page]), "no room yet"
    assert (
        owner.give_room(page, 0, 64, 64) and owner.give_room(page, 2, 256, 128) and not owner.give_room(page, 2, 0, 64)
    )
    assert reader.store(KEYS[0], b"abc", 2, 7, KEYS[5]) == 2 and owner.posted([page, page]) == [0, 1]
    assert reader.store(KEYS[0], b"x", 0, 0, None) == -1 and reader.store(KEYS[0], bytes(129), 0, 0, None) == 0
    assert reader.store(KEYS[1], bytes(100), 0, 0, None) == 2 and reader.held == 0
    assert reader.sizes([KEYS[0], KEYS[1]]) == [3, 100] and reader.prefix(KEYS[:3]) == 2
    (view,) = reader.hold([KEYS[0]])
    assert view and bytes(view) == b"abc" and view.is_sound() and owner.held_offsets([page]) == {64}
    posts = owner.posts(page)
    assert posts[0][1:] == (1, 0, 64, 64, KEYS[0], 3, zlib.crc32(b"abc"), 2, 7, KEYS[5]) and posts[1][1:6] == (
        2,
        2,
        256,
        128,
        KEYS[1],
    )
    assert owner.put(KEYS[0], 64, 3, zlib.crc32(b"abc"))
    owner.end_post(page, 0)
    assert owner.posted([page]) == [0] and [post[2] for post in owner.posts(page)] == [2]
    assert reader.sizes([KEYS[0]]) == [3] and bytes(view) == b"abc"
    owner.end_post(page, 2)
    assert not owner.posted([page]) and reader.sizes([KEYS[1]]) == [None], "it was refused"


def test_of_two_values_in_slots_the_later_is_read_and_entered_last() -> None:
    memory, values = directory_of(), mmap.mmap(-1, VALUES_BYTES)
    owner, (fd, page) = native.HostDirectory(memory), page_of(slots=4)
    reader = native.HostReader(memory, values, fd)
    assert owner.put(KEYS[0], 4096, 9, 0)
    for slot, offset in ((3, 0), (1, 64)):
        assert owner.give_room(page, slot, offset, 64)
    for data in (b"first", b"second"):
        assert reader.store(KEYS[0], data, 0, 0, None) > 0
    (view,) = reader.hold([KEYS[0]])
    assert view and bytes(view) == b"second"
    assert [post[6] for post in owner.posts(page)] == [5, 6]


def test_room_is_taken_back_or_filled_and_never_both() -> None:
    """While a client writes, the owner takes its room back and gives the slot to other room."""
    size = 16 << 20
    memory, values = directory_of(values_bytes=2 * size), mmap.mmap(-1, 2 * size)
    owner, (fd, page) = native.HostDirectory(memory), page_of(slots=1)
    reader = native.HostReader(memory, values, fd)
    outcomes, was_held = set(), False
    for turn in range(12):
        assert owner.give_room(page, 0, 0, size)
        got: list[int] = []
        thread = threading.Thread(target=lambda got=got: got.append(reader.store(KEYS[0], bytes(size), 0, 0, None)))
        thread.start()
        while turn % 4 != 3 and owner.held_offsets([page]) != {0} and not owner.posted([page]):
            time.sleep(0)
        held = owner.held_offsets([page])
        taken = owner.take_room(page, 0)
        was_held |= taken and held == {0}
        if taken:
            assert owner.give_room(page, 0, size, size), "the same slot, other room"
        thread.join()
        assert got[0] == 0 or not (taken and held == {0}), "its room was taken while it wrote"
        outcomes.add((taken, got[0] > 0, bool(owner.posts(page))))
        owner.take_room(page, 0)
        owner.end_post(page, 0)
    assert outcomes <= {(True, False, False), (False, True, True), (True, True, True)}
    assert was_held, "in the middle of writing"


def test_who_stores_wakes_an_owner_that_sleeps_or_has_much_to_do() -> None:
    memory, values = directory_of(), mmap.mmap(-1, VALUES_BYTES)
    owner, (fd, page) = native.HostDirectory(memory), page_of(slots=40)
    reader = native.HostReader(memory, values, fd)
    for slot in range(40):
        assert owner.give_room(page, slot, 64 * slot, 64)
    assert reader.store(KEYS[0], b"x", 0, 0, None) == 2
    owner.set_awake(True)
    assert [reader.store(KEYS[0], b"x", 0, 0, None) for _ in range(20)] == [1] * 14 + [2] + [1] * 5
    assert native.HostDirectory(memory) and reader.store(KEYS[0], b"x", 0, 0, None) == 2, "a new owner"
