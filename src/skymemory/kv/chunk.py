"""Chunks: a stored value cut into fixed pieces, each with its checksum.

The server of chunk ``index`` (0-based) among S servers is ``index % S`` (paper §3.2). One chunk missing means
the value is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skymemory import native
from skymemory.errors import InvalidInput

DEFAULT_CHUNK_BYTES = 6144
Buffer = bytes | bytearray | memoryview
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ValueShape:
    """How ``value_bytes`` are cut: all chunks of ``chunk_bytes`` but the last, which may be shorter.

    An empty value still has one (empty) chunk: something must be somewhere for it to be found.
    """

    value_bytes: int
    chunk_bytes: int = DEFAULT_CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.value_bytes < 0 or self.chunk_bytes < 1:
            raise InvalidInput(
                f"cannot cut {self.value_bytes} bytes into chunks of {self.chunk_bytes}: "
                "a value has 0 or more bytes, a chunk 1 or more"
            )

    @property
    def chunks(self) -> int:
        return max(1, -(-self.value_bytes // self.chunk_bytes))

    def length_of(self, index: int) -> int:
        """Bytes of chunk ``index``."""
        start, end = self.span(index)
        return end - start

    def span(self, index: int) -> tuple[int, int]:
        """Where chunk ``index`` lies in the value: ``value[start:end]``."""
        if not 0 <= index < self.chunks:
            raise InvalidInput(f"chunk {index} of a value of {self.chunks} chunks")
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.value_bytes)


def split(value: Buffer, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> list[memoryview]:
    """The chunks of ``value``, as views of it: nothing is copied."""
    view = memoryview(value).cast("B")
    shape = ValueShape(len(view), chunk_bytes)
    return [view[start : start + chunk_bytes] for start in range(0, max(1, shape.value_bytes), chunk_bytes)]


def join(parts: Sequence[Buffer], shape: ValueShape) -> bytearray:
    """The value of ``shape`` from its chunks in order. A wrong number or length is :class:`InvalidInput`."""
    if len(parts) != shape.chunks:
        raise InvalidInput(f"{len(parts)} chunks given for a value of {shape.chunks}")
    for index, part in enumerate(parts):
        if memoryview(part).nbytes != shape.length_of(index):
            raise InvalidInput(f"chunk {index} has {memoryview(part).nbytes} bytes, expected {shape.length_of(index)}")
    return bytearray().join(parts)


def chunk_checksums(value: Buffer, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Checksums:
    """CRC-32 (as zlib's) of every chunk, uint32, in order."""
    shape = ValueShape(memoryview(value).nbytes, chunk_bytes)
    if shape.value_bytes == 0:
        return np.zeros(1, dtype=np.uint32)
    return native.crc32_chunks(value, chunk_bytes)


def value_checksum(checksums: Checksums, shape: ValueShape) -> int:
    """CRC-32 of the whole value from its chunks' checksums, without reading the value again."""
    if len(checksums) != shape.chunks:
        raise InvalidInput(f"{len(checksums)} checksums given for a value of {shape.chunks} chunks")
    if shape.value_bytes == 0:
        return 0
    return native.crc32_join(
        np.ascontiguousarray(checksums, dtype=np.uint32).data, shape.chunk_bytes, shape.value_bytes
    )
