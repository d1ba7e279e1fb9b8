"""A prefix index in a file: what a router that restarts finds of what it knew.

The file is replaced as a whole: whoever reads it has the old one or the new one. A precise index is not kept: an engine
that restarted meanwhile could not be told from one that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.snapshot import (
    Snapshot,
    pack_snapshot,
    restore,
    take_snapshot,
    unpack_snapshot,
)
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded, write_private

MAX_FILE_BYTES = 4 << 30


def save_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Write what ``slots`` (by name) hold; the file's size in bytes.

    Raises:
        InvalidInput: a file that cannot be written. What was there is still there then.
    """
    return write_snapshot(path, take_snapshot(index, kind, slots))


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """As ``save_index``, with what was taken before: packing and writing can go on in a thread."""
    data = pack_snapshot(snapshot)
    try:
        write_private(path, data, durable=True)
    except OSError as error:
        raise InvalidInput(f"the index cannot be kept in {path}: {error.strerror or error}") from None
    return len(data)


def load_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Put what the file has of ``slots`` (by name) into ``index``; how many blocks. None: no file, an index as it was.

    Raises:
        InvalidInput: a file that cannot be read, is damaged, of another version or of other blocks. The index is empty
            then, and a router says so and goes on.
    """
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise InvalidInput(f"the index in {path} cannot be read: {error.strerror or error}") from None
    try:
        return restore(index, unpack_snapshot(data), kind, slots)
    except InvalidInput as error:
        raise type(error)(f"{path}: {error}") from None
