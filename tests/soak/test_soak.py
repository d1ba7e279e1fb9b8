"""A bounded excerpt of the soak; the whole is `make soak`."""

from __future__ import annotations

import pytest
from tests.soak.virtual import Setting, VirtualSoak


@pytest.mark.parametrize("seed", [1, 2])
def test_hours_with_faults(seed):
    outcome = VirtualSoak(Setting(days=0.1, operations=1000, full_blocks=6, seed=seed, deaths_per_day=200)).run()
    assert outcome.wrong == [] and outcome.open_books == []
    assert outcome.counted["get: hit"] > 150 and outcome.counted["put full: stored"] > 0
    assert outcome.counted["deaths"] > 5 and outcome.moves == (33, 7)
    assert min(size for name, size in outcome.books.items() if name != "memory_used_bytes") > 0, outcome.books


def test_the_same_seed_is_the_same_soak():
    setting = Setting(days=0.02, operations=150, full_blocks=1, seed=5, deaths_per_day=500)
    one, other = VirtualSoak(setting).run(), VirtualSoak(setting).run()
    assert (one.counted, one.books) == (other.counted, other.books)
