"""Floods against the picker as a process: others are answered, and its memory stays what it was."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from tests.end_to_end.envoy import Picker, running_picker
from tests.end_to_end.floods import FLOODS, flooded

pytestmark = pytest.mark.slow
FOR_S = 3.0
MOST_MS = dict.fromkeys(FLOODS, 50.0) | {"whole bodies": 150.0}
"""A JSON body of 14 MB is decoded in one call, which holds Python's lock: 20 to 70 ms, by what else runs."""
MOST_MIB = dict.fromkeys(FLOODS, 64.0) | {"whole bodies": 128.0}
"""Reading a body of 15 MB takes five times as much while it lasts; one at a time is read."""


@pytest.fixture(scope="module")
def picker() -> Iterator[Picker]:
    with running_picker("--endpoint", "127.0.0.1:9", settings='health.metrics_path = ""') as picker:
        yield picker


@pytest.mark.parametrize("name", FLOODS)
def test_health_is_answered_beside_a_flood(picker: Picker, name: str) -> None:
    met = flooded(name, picker.port, psutil.Process(picker.process.pid), FOR_S)
    assert met.checks > 50 and met.sent_mib > 5, met
    assert met.p99_ms < MOST_MS[name], met
    assert met.more_mib < MOST_MIB[name], met
