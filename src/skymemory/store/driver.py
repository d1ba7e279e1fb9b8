"""What the constellation store needs of a transport: a client machine and somebody to carry its datagrams."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from skymemory.protocol.client import ClientMachine, Finished


class ClientDriver(Protocol):
    """``transport.udp_client.UdpClient`` over sockets, ``transport.simulated.SimulatedClient`` over virtual time."""

    @property
    def machine(self) -> ClientMachine: ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held around beginning operations and running them."""

    def now_s(self) -> float: ...

    def run(self, numbers: Iterable[int]) -> dict[int, Finished]:
        """Carry datagrams until these operations have ended."""

    def close(self) -> None: ...
