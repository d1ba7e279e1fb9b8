"""The records of an index, as a list."""

from __future__ import annotations

from skymemory.index.journal import write_records
from skymemory.index.radix import RadixIndex


def records_of(index: RadixIndex) -> list[bytes]:
    records: list[bytes] = []
    write_records(index, records.append)
    return records
