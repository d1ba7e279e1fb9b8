"""One window for all that comes to a ground host: who may fill it next."""

from __future__ import annotations

import os

from tests.store.conftest import simulated

from skymemory.protocol.client.machine import ClientConfig
from skymemory.protocol.client.transfer import Striping
from skymemory.protocol.clock import STRATEGY_CODES


def test_a_small_read_does_not_wait_behind_large_ones() -> None:
    sky = simulated()
    host = sky.connect(ClientConfig(1, window_bytes=128 << 10))
    infos = []
    for number, size_bytes in enumerate((400_000, 400_000, 400_000, 5_000)):
        value, key = os.urandom(size_bytes), bytes([number]) * 32
        infos.append(host.write(key, value, Striping(6144, STRATEGY_CODES["rotation_hop"], 10)).info)
    machine = host.machine
    numbers = [
        machine.get(info, memoryview(bytearray(info.value_bytes)), sky.now_s) for info in infos if info is not None
    ]
    ended = host.run(numbers)
    assert all(one.ok for one in ended.values())
    seconds = [ended[number].report.seconds for number in numbers]
    assert seconds[3] < min(seconds[:3]) / 2
    assert seconds[0] < seconds[1] < seconds[2], "one after the other: the first can be used first"
