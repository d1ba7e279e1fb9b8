"""What a constellation store is built on: a driver that runs the client's state machine, and the layout of values."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from skymemory.errors import InvalidInput, ValueTooLarge
from skymemory.kv.chunk import DEFAULT_CHUNK_BYTES
from skymemory.protocol.client.machine import ClientMachine, Finished
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.protocol.wire import CHUNK_REF_BYTES
from skymemory.units import format_size


class ClientDriver(Protocol):
    """``transport.udp_client.UdpClient`` over sockets, ``transport.simulated.SimulatedClient`` over virtual time."""

    @property
    def machine(self) -> ClientMachine: ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while operations are begun and run."""

    def now_s(self) -> float: ...

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Send and receive until these operations have ended."""

    def close(self) -> None: ...


_WIRE_LIMIT_BYTES = (1 << 32) - 1
_MAX_CHUNKS = 1 << 20
_MAX_SERVERS = 64
"""Another writer may use more servers than we do: up to this many are believed."""


@dataclass(frozen=True, slots=True)
class SkySettings:
    """How values are laid out in the sky. ``memory_per_satellite_bytes`` 0: unknown; only the wire's 4 GiB limit
    values.
    """

    strategy: str = "rotation_hop"
    servers: int = 10
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    memory_per_satellite_bytes: int = 0
    lazy_eviction: bool = True
    """Whether a reader that finds a chunk gone evicts the rest of the value."""
    replicas: int = 1
    """Copies of every chunk, on different satellites (and planes, as far as the box has rows)."""

    @property
    def strategy_code(self) -> int:
        """Its number on the wire; InvalidInput for an unknown strategy."""
        code = STRATEGY_CODES.get(self.strategy)  # type: ignore[call-overload]
        if code is None:
            raise InvalidInput(f"strategy {self.strategy!r}: expected one of {', '.join(STRATEGY_CODES)}")
        return int(code)

    @property
    def largest_value_bytes(self) -> int:
        """The largest value that fits into an empty box."""
        if not self.memory_per_satellite_bytes:
            return _WIRE_LIMIT_BYTES
        chunks = self.memory_per_satellite_bytes // (self.chunk_bytes + CHUNK_REF_BYTES)
        return min(_WIRE_LIMIT_BYTES, chunks * self.servers * self.chunk_bytes // self.replicas)

    def can_hold(self, chunks: int, chunk_bytes: int, value_bytes: int) -> bool:
        """Whether a value that a satellite reports can exist: its chunks, with their overhead, must fit into the
        satellites. If their memory is unknown, up to a million chunks are believed.
        """
        if not self.memory_per_satellite_bytes:
            return chunks <= _MAX_CHUNKS
        room_bytes = self.memory_per_satellite_bytes * max(self.servers, _MAX_SERVERS)
        return value_bytes + chunks * CHUNK_REF_BYTES <= room_bytes

    def check_size(self, size_bytes: int) -> None:
        """Raises ``ValueTooLarge``, naming the limit, for a value that could never fit."""
        if size_bytes > self.largest_value_bytes:
            raise ValueTooLarge(
                f"a value of {format_size(size_bytes)} on {self.servers} satellites of "
                f"{format_size(self.memory_per_satellite_bytes)}: at most {format_size(self.largest_value_bytes)} fit; "
                "use more servers, more memory per satellite or smaller values"
            )
