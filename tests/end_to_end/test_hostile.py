"""Hostile clients beside others, as processes: others are answered meanwhile and afterwards (`make hostile`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.end_to_end.hostile.trial import CAUSES, Cause, Times, run

pytestmark = pytest.mark.slow
HELD = ("held_bodies", "half_heads", "slow_readers", "half_handshakes", "idle", "flood")
"""Causes that hold what clients share."""
CHOSEN = [cause for cause in CAUSES if cause.attack in HELD]


@pytest.mark.parametrize("cause", CHOSEN, ids=lambda cause: cause.attack)
def test_others_are_answered_beside_and_after_it(cause: Cause) -> None:
    if cause.count > 4000:
        cause = replace(cause, count=4000, files=6144)  # more than the router may have, and quicker
    met = run(cause, Times(1.0, 4.0, 2.0, 2.0))
    assert met.asked > 50 and met.share >= 0.99 and met.after_share == 1.0, met
    assert met.most_sends == 1 and met.mib < 700, met  # how long it takes, `make hostile` says on an idle computer
