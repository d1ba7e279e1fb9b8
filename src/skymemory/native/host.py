"""The compiled classes of a host arena, as type checkers see them; without the helper there are none.

A naive twin in the tests is their judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from typing_extensions import Buffer


class HostDirectory:
    """The owner's side of a directory (``store.host.layout``). It begins with what an earlier owner left there.

    Raises ValueError for a directory of another release.
    """

    def __init__(self, directory: mmap) -> None: ...

    def put(self, key: bytes, offset: int, size_bytes: int, check: int) -> bool:
        """Enter a value, or replace it. False: all entries are taken. ``check``: its CRC-32 and flags."""
        raise NotImplementedError

    def take(self, key: bytes) -> bool:
        """Remove a value. False: it was not there."""
        raise NotImplementedError

    def mark_checked(self, key: bytes, offset: int) -> bool:
        """Mark the value at ``offset`` as compared with its CRC-32. False: it is another value now."""
        raise NotImplementedError

    def set_end(self, key: bytes, offset: int, end_ns: int) -> bool:
        """Let the value at ``offset`` expire at a monotonic time, for all readers at once; 0: never. False: it is
        another value now.
        """
        raise NotImplementedError

    def entries(self) -> list[tuple[bytes, int, int, int, int]]:
        """Return key, offset, size in bytes, check and end (``set_end``) of all values."""
        raise NotImplementedError

    def held_offsets(self, pages: Sequence[mmap]) -> set[int]:
        """Return the offsets that pages of clients hold. What was removed before this call, and is not among them, is
        held by no client from now on.
        """
        raise NotImplementedError

    def set_awake(self, awake: bool) -> None:
        """Show clients whether they have to wake the owner after a store."""
        raise NotImplementedError

    def give_room(self, page: mmap, slot: int, offset: int, room_bytes: int) -> bool:
        """Give a client room for a value of that rounded size in an empty slot. False: the slot is not empty."""
        raise NotImplementedError

    def take_room(self, page: mmap, slot: int) -> bool:
        """Take a slot's room back; a client that writes there just now holds it. False: it was filled, or is empty."""
        raise NotImplementedError

    def posted(self, pages: Sequence[mmap]) -> list[int]:
        """Return the positions of pages with values in slots."""
        raise NotImplementedError

    def posts(self, page: mmap) -> list[tuple[int, int, int, int, int, bytes, int, int, int, int, bytes]]:
        """Return the values in slots in the order of their stores: monotonic time in ns, number, slot, offset and bytes
        of the room, key, bytes, CRC-32, and the kind, depth and parent of the place, as the client wrote them.
        """
        raise NotImplementedError

    def end_post(self, page: mmap, slot: int) -> None:
        """Empty a full slot, whose value is entered or refused."""
        raise NotImplementedError

    def uses(self, page: mmap, since: int) -> tuple[int, list[int]]:
        """Return how many uses a client has noted in all, and the offsets of those after the first ``since``."""
        raise NotImplementedError


class HostView:
    """Read-only buffer of a value in the arena, which stays as it is while this object lives."""

    checked: bool
    crc: int
    offset: int

    def is_sound(self) -> bool:
        """Compare the bytes with their CRC-32."""
        raise NotImplementedError

    def __buffer__(self, flags: int) -> memoryview:
        raise NotImplementedError


class HostRoom:
    """Writable buffer of room in the arena, which no other process is given while this object lives."""

    def crc(self, known: int | None) -> int | None:
        """Return the CRC-32 of the bytes, unless it is known; None if the room has become void."""
        raise NotImplementedError

    def __buffer__(self, flags: int) -> memoryview:
        raise NotImplementedError


class HostReader:
    """A client's side: finds, holds and writes values without asking their owner. Long copies and checksums release
    the interpreter's lock. ``page_fd``, a descriptor of its page, is its own from now on.

    Raises ValueError for files of another release, OSError if the page cannot be mapped.
    """

    epoch: int
    """Number of owners that the arena has had."""
    grant: int
    """Number under which room is given out; once it is another, the room is void."""
    held: int
    """Number of values that are held."""

    def __init__(self, directory: mmap, values: mmap, page_fd: int) -> None: ...

    def hold(self, keys: Sequence[bytes]) -> list[HostView | Literal[False] | None]:
        """Return a view of each value, None if it is absent, False if too many are held already."""
        raise NotImplementedError

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the size of each value in bytes, None if it is absent."""
        raise NotImplementedError

    def prefix(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading keys that are present."""
        raise NotImplementedError

    def room(self, offset: int, size_bytes: int, grant: int) -> HostRoom | None:
        """Hold room that was given out under ``grant``. None: it is void, or too many values are held."""
        raise NotImplementedError

    def write(self, offset: int, value: Buffer, grant: int) -> int | None:
        """Copy a value into room that was given out under ``grant``; return its CRC-32. None, nothing is written: the
        room is void, or too many values are held.
        """
        raise NotImplementedError

    def store(self, key: bytes, value: Buffer, kind: int, depth: int, parent: bytes | None) -> int:
        """Store a value in a slot with room for it, from which the owner takes it: this reader sees it at once. Return
        0 if there is none, -1 if there is as soon as the owner has taken earlier ones, 2 if the owner has to be woken,
        else 1. ``kind``: of the place (``store.host.messages``).
        """
        raise NotImplementedError

    def populate(self, offset: int, size_bytes: int) -> bool:
        """Map pages of the values now, instead of at their first use. False: the kernel does not."""
        raise NotImplementedError

    def renew(self) -> None:
        """Make all room void that was given out before."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Close a forked child's copy of the page's descriptor."""
        raise NotImplementedError
