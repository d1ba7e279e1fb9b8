"""Two copies over real processes and sockets: a plane of the box disabled, back, filled again; then another."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.test_faults_of_processes import Sky, plane
from tests.settings_file import settings_file

from skymemory.testbed.connect import open_constellation
from skymemory.testbed.control import ping_all

VALUES = {hashlib.sha256(b"%d" % number).digest(): os.urandom(200_000) for number in range(12)}


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Sky]:
    sky = Sky(tmp_path / "run")
    with settings_file("sweep = 1") as words:
        sky("up", "--base-port", "auto", "--delay", "off", "--replicas", "2", *words)
    yield sky
    sky("down")


def held(sky: Sky) -> int:
    return sum(answer["chunks_held"] for answer in ping_all(sky.plan, 3.0).values() if answer is not None)


@pytest.mark.brief()
def test_every_read_is_served_with_a_plane_of_the_box_dead_and_copies_are_made_again(sky: Sky) -> None:
    store = open_constellation(sky.run_dir)
    try:
        assert all(store.put_many(list(VALUES.items())))
        everything = held(sky)
        for number in (1, 2):
            sky("disable", "--plane", str(number))
            assert sky.silent() == plane(number)
            for _ in range(2):
                found = store.get_many(list(VALUES))
                assert [None if one is None else bytes(one) for one in found] == list(VALUES.values())
            sky("enable", "--all")
            deadline = time.monotonic() + 20
            while held(sky) < everything and time.monotonic() < deadline:
                time.sleep(0.2)
            assert held(sky) == everything
    finally:
        store.close()
