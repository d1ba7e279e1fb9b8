"""The state of the Python satellite as the bytes that ``sky_state`` of the C one gives, part by part."""

from __future__ import annotations

from tests.flight.machine import FlightMachine, counter_names, us

from skymemory.protocol.satellite.machine import SatelliteMachine
from skymemory.protocol.wire import Address

NOT_OF_THE_TWIN = ("outbox_full", "pools_full")


def _numbers(*values: int) -> bytes:
    return b"".join((value & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "big") for value in values)


def part(machine: SatelliteMachine, name: str, other: FlightMachine) -> bytes:
    """One part of the state. ``other`` numbers the links of ground hosts."""
    return _PARTS[name](machine, other)


def _moves(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    locator = machine._locator
    return _numbers(*locator.moves, *locator.before, *locator.pushed, machine.neighbours.pushed_at_ms)


def _counters(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    return _numbers(*(machine.counters.get(name) for name in counter_names() if name not in NOT_OF_THE_TWIN))


def _figures(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    store = machine.store
    accounts = store.ledger.figures().values()
    return _numbers(store.used_bytes, store.pinned_bytes, store.leased_bytes, len(store), *accounts)


def _chunks(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    shares = machine.store.shares
    return b"".join(key + b"".join(shares[key][index][0] for index in sorted(shares[key])) for key in sorted(shares))


def _promises(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    store, packed = machine.store, b""
    for key in sorted({*store.pins, *store.expiries, *store.leases}):
        holders = store.leases.get(key, {})
        untils = sum(us(until_s) ^ ground for ground, until_s in holders.items())
        packed += key + _numbers(us(store.pins.get(key, 0.0)), us(store.expiries.get(key, 0.0)), len(holders), untils)
    return packed


def _order(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    return b"".join(machine.store.order())


def _links(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    neighbours, links = machine.neighbours, machine.neighbours.links
    packed = b""
    for name, neighbour in neighbours._neighbours.items():
        packed += _numbers(Address(*name).pack(), neighbour.down)
    packed += b"".join(links._packed_declarations.values())
    for ground, end in machine._router._ground_links.items():
        packed += _numbers(ground, other.link(end))
    return packed + _numbers(links.satellites_searched)


def _outbox(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    outbox, postponed, handover = machine._outbox, machine._postponed, machine.handover
    return _numbers(
        outbox._sequence,
        outbox.credit.each_bytes,
        len(postponed._queue),
        postponed.kept,
        postponed.dropped,
        handover.retransmitted,
        handover.chunks_planned,
        handover.idle,
        handover.at_rest,
        machine._state.timers_wait,
    )


def _history(machine: SatelliteMachine, other: FlightMachine) -> bytes:
    history, packed = machine._state.history, b""
    for key, at_s in history._written_s.items():
        packed += key + _numbers(us(at_s))
    for key, (until_s, setting) in history._banned_until.items():
        packed += key + _numbers(us(until_s)) + (setting or bytes(12))
    return packed + b"".join(key + setting for key, setting in history.dead.items())


_PARTS = {
    "moves": _moves,
    "counters": _counters,
    "figures": _figures,
    "chunks": _chunks,
    "promises": _promises,
    "order": _order,
    "links": _links,
    "outbox": _outbox,
    "history": _history,
}
