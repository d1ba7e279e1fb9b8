"""A bounded number of the fuzzers' inputs; `make fuzz` tries a million."""

from __future__ import annotations

import pytest
from tests.fuzz.mutations import resealed
from tests.fuzz.targets import TARGETS, fuzz
from tests.properties.wire_traffic import SOUND

from skymemory import native


@pytest.mark.brief(every=5)
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_breaks(name):
    fuzz(name, round(12_000 * TARGETS[name][1]), seed=7)


def test_resealing_makes_damaged_packets_pass_the_checksums():
    """Else the fuzzers would only ever knock at the first door."""
    for packet in SOUND:
        assert resealed(packet) == packet
        damaged = bytearray(packet)
        damaged[21] ^= 0x10
        sealed = resealed(bytes(damaged))
        assert native.verify_segments(sealed, len(sealed)) in (b"\0", b"\1") and sealed != packet
