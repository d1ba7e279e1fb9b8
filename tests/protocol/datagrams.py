"""One datagram given to a machine."""

from __future__ import annotations

from typing import Any


def receive_datagram(machine: Any, data: Any, *source_and_time: Any) -> None:
    machine.receive_batch(data, len(data), *source_and_time)
