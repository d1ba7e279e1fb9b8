"""Replicas of a router over the same servers, and requests for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from skymemory import native
from skymemory.conductor.picker import Fleet, Picker, Scorer
from skymemory.conductor.prefix_index.replicated import SharedPrefixIndex
from skymemory.conductor.request import Decision, Prompt, Request
from skymemory.conductor.sharing.elsewhere import Elsewhere
from skymemory.conductor.sharing.replica_state import ReplicaState
from skymemory.conductor.strategies.registry import named

SERVERS = ("a", "b", "c")


def request(number: int, blocks: int = 20, streams: bool = True) -> Request:
    tokens = np.full(blocks, number, dtype="<u4").tobytes()
    chain = native.chain_hashes(tokens, 4, 1)
    return Request(Prompt(chain, chain, 16, 16 * blocks), output_tokens=7, streams=streams)


@dataclass
class Replica:
    """A router: its picker and what it shares."""

    picker: Picker
    state: ReplicaState

    @classmethod
    def of(cls, number: int, servers: tuple[str, ...] = SERVERS, strategy: str = "least-ttft") -> Replica:
        fleet = Fleet()
        for server in servers:
            fleet.add(server)

        def name_of(slot: int) -> str | None:
            return next((server.name for server in fleet if server.slot == slot), None)

        def slot_of(name: str) -> int | None:
            server = fleet.servers.get(name)
            return None if server is None else server.slot

        index = SharedPrefixIndex(name_of, slot_of, 1000)
        scorer: Scorer = named(strategy, index=index) if strategy == "least-ttft" else named(strategy)
        picker = Picker(fleet, scorer, seed=number)
        state = ReplicaState(bytes([number]) * 16, index if strategy == "least-ttft" else None)
        state.connect([picker])
        return cls(picker, state)

    def send(self, number: int, now_s: float, among: tuple[str, ...] | None = None, blocks: int = 20) -> Decision:
        decision = self.picker.pick(request(number, blocks), now_s, among)
        self.picker.routed(decision, now_s)
        return decision

    def elsewhere(self) -> dict[str, tuple[int, int, int]]:
        """Requests of other replicas, those without a first byte and their missing tokens, by server."""
        return {
            server.name: (server.elsewhere, server.elsewhere_prefilling, server.elsewhere_tokens)
            for server in self.picker.fleet
        }

    def wait_s(self, server: str, now_s: float) -> float:
        return self.picker.scorer.queue_s(self.picker.fleet.servers[server], now_s)  # type: ignore[attr-defined]


def booked(elsewhere: Elsewhere, sender: bytes) -> dict[int, tuple[str, bool]]:
    return {number: (server, computes) for number, server, computes in elsewhere.bookings(sender)}
