"""Files of a host arena, as they lie in shared memory (``native/host.h`` has the same in C).

``values`` holds the bytes of values. ``directory`` says which value lies where: a head, buckets of a hash table
(uint32, entry + 1), entries of a cache line each, and when their values expire; only the owner writes it. ``pages/N``
has the offsets that its client, the only writer, holds (leases), a ring of those that it used, and slots: room for
values that it fills without asking, from which the owner enters them. Words are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap

from skymemory.errors import InvalidInput

HEAD_BYTES = 4096
ENTRY_BYTES, _END_BYTES = 64, 8
MAGIC, PAGE_MAGIC = b"SKYHOST2", b"HSKPAGE2"
CHECKED = 1 << 32
"""Flag beside a value's CRC-32: the owner has compared it."""
HOLDS, USES = 16_384, 4_096
"""Values that a client may hold at a time; uses that it may note before the owner reads them."""
SLOTS = 64
"""Values that a client may store without asking, before the owner takes them."""
_SLOT_BYTES = 128
PAGE_BYTES = HEAD_BYTES + 8 * (HOLDS + USES) + _SLOT_BYTES * SLOTS

_HEAD = struct.Struct("<8sQQQQQ16sQQ")
_PAGE = struct.Struct("<8sQQQQQ")

_BYTES_PER_ENTRY = 4096
_LEAST_ENTRIES, _MOST_ENTRIES = 4_096, 1 << 26
_SLACK = 8
"""Inverse share by which the arena exceeds its budget: for rounding, and evicted values still held."""
_LEAST_SLACK_BYTES = 1 << 20
_PAGE_OF_MEMORY_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Sizes of an arena's files for a budget in bytes."""

    budget_bytes: int

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise InvalidInput(f"the host store needs a budget above 0 bytes, got {self.budget_bytes}")

    @property
    def values_bytes(self) -> int:
        slack_bytes = max(self.budget_bytes // _SLACK, _LEAST_SLACK_BYTES)
        return -(-(self.budget_bytes + slack_bytes) // _PAGE_OF_MEMORY_BYTES) * _PAGE_OF_MEMORY_BYTES

    @property
    def entries(self) -> int:
        return min(max(self.budget_bytes // _BYTES_PER_ENTRY, _LEAST_ENTRIES), _MOST_ENTRIES)

    @property
    def buckets(self) -> int:
        return 1 << (2 * self.entries - 1).bit_length()

    @property
    def directory_bytes(self) -> int:
        return (
            HEAD_BYTES + -(-4 * self.buckets // ENTRY_BYTES) * ENTRY_BYTES + (ENTRY_BYTES + _END_BYTES) * self.entries
        )

    def is_of(self, directory: mmap) -> bool:
        """Return True if a directory has this shape, in this release."""
        magic, values_bytes, entries, buckets, *_ = _HEAD.unpack_from(directory)
        return (magic, values_bytes, entries, buckets) == (MAGIC, self.values_bytes, self.entries, self.buckets)

    def write_head(self, directory: mmap, seed: int, instance: bytes) -> None:
        sizes = (self.values_bytes, self.entries, self.buckets)
        _HEAD.pack_into(directory, 0, MAGIC, *sizes, seed, 0, instance, 0, 0)


def is_of_boot(directory: mmap, boot: bytes) -> bool:
    """Return True if times in the directory are of this boot of the computer, and from now on they are."""
    begin, end = _HEAD.size, _HEAD.size + len(boot)
    before, directory[begin:end] = directory[begin:end], boot
    return before == boot


def instance_of(directory: mmap) -> bytes:
    """Return the arena's random name, new for each arena made."""
    name: bytes = _HEAD.unpack_from(directory)[6]
    return name


def values_bytes_of(directory: mmap) -> int:
    """Return the size of ``values`` by the directory's head. Raises InvalidInput for another release's file."""
    magic, values_bytes, *_ = _HEAD.unpack_from(directory)
    if magic != MAGIC:
        raise InvalidInput("the host arena is of another release: stop the process that serves it, and start it again")
    return int(values_bytes)


def write_page_head(page: mmap) -> None:
    _PAGE.pack_into(page, 0, PAGE_MAGIC, HOLDS, USES, 0, 0, SLOTS)
