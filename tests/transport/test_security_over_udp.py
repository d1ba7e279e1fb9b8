"""Attacks over real sockets: all 95 satellites on theirs, the attacker on his own. Refused, and counted, each."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.conftest import store_on, udp_sky, udp_store

from skymemory.constellation.torus import SatelliteId
from skymemory.keys import KeyRing, first_ring
from skymemory.kv.block import hash_blocks
from skymemory.kv.context import CacheContext
from skymemory.native import crc32
from skymemory.protocol import messages
from skymemory.protocol.auth import Authority
from skymemory.protocol.messages import Selection
from skymemory.protocol.wire import (
    Address,
    ChunkRef,
    Op,
    PlacementTag,
    SegmentBatch,
    SkyHeader,
    build_packet,
    bulk_batch,
    parse_packet,
    single,
)
from skymemory.reasons import Miss
from skymemory.store.base import Presence
from skymemory.store.named_values import NamedValues
from skymemory.store.sealed import SealedStore
from skymemory.store.sky.shared_index import SharedIndex
from skymemory.store.sky.store import ConstellationStore

MINE, WRONG, NEW = bytes(range(32)), bytes(range(1, 33)), bytes(range(2, 34))
KEY = bytes(range(32))
VALUE = bytes(range(256)) * 400
TARGET = SatelliteId(2, 9)
"""The centre of the box: it holds chunks of every value."""


class Attacker:
    """A UDP socket and what anyone can read in this repository."""

    def __init__(self, store: ConstellationStore) -> None:
        self.store = store
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.settimeout(2.0)
        self.endpoint = store._driver._satellites[TARGET]  # type: ignore[attr-defined]

    def header(self, op: Op, source: Address | None = None) -> SkyHeader:
        source = source or Address(TARGET.plane, TARGET.slot, 0xFF)
        return SkyHeader(op, Address(*TARGET), source, 0 if source.shell == 0 else 66, 1)

    def send(self, batch: SegmentBatch) -> str:
        """What the satellite says to it: the name of the answer's status."""
        for datagram in batch.datagrams():
            self.sock.sendto(datagram, self.endpoint)
        try:
            return parse_packet(self.sock.recv(65_536)).header.status.name
        except TimeoutError:
            return "nothing"

    def figures(self) -> dict[str, int]:
        """The target's housekeeping, as its operator reads it."""
        driver = self.store._driver
        with driver.lock:
            number = driver.machine.ask(Op.PING, b"", TARGET, driver.now_s())
            answer = driver.run([number])[number]
        assert answer.ok
        return messages.unpack_housekeeping(answer.body)

    def close(self) -> None:
        self.sock.close()


@contextmanager
def under_attack(
    ring: KeyRing | None = None, index: bool = True, signed_answers: bool = False
) -> Iterator[tuple[ConstellationStore, Attacker]]:
    by = Authority(ring or first_ring(MINE), signed_answers=signed_answers)
    with udp_store(SharedIndex() if index else None, by) as store:
        assert store.put_many([(KEY, VALUE)]) == [True]
        attacker = Attacker(store)
        try:
            yield store, attacker
        finally:
            attacker.close()


def forged_migrate(attacker: Attacker, by: Authority | None, source: Address | None = None) -> SegmentBatch:
    payload = b"poison"
    tag = PlacementTag(3, 10, 0, 0, 0)
    ref = ChunkRef(b"p" * 32, 0, 1, len(payload), crc32(payload), len(payload), crc32(payload), tag).pack()
    batch = bulk_batch(attacker.header(Op.MIGRATE, source), ref, [payload], 0, time.time())
    return batch if by is None else by.sign(batch, time.time())


@pytest.mark.parametrize("by", [None, Authority(first_ring(WRONG))], ids=["no key", "wrong key"])
def test_a_forged_eviction_is_refused_and_counted(by: Authority | None) -> None:
    with under_attack() as (store, attacker):
        before = attacker.figures()
        packet = build_packet(attacker.header(Op.EVICT), messages.pack_keys([KEY]), 0, time.time())
        batch = single(packet) if by is None else by.sign(single(packet), time.time())
        assert attacker.send(batch) == "REFUSED"
        after = attacker.figures()
        assert after["packets_refused"] == before["packets_refused"] + 1
        assert after["chunks_held"] == before["chunks_held"] and after["chunks_deleted"] == 0
        assert store.get_many([KEY]) == [VALUE]


@pytest.mark.parametrize("by", [None, Authority(first_ring(WRONG))], ids=["no key", "wrong key"])
def test_a_forged_migrate_is_refused_and_counted(by: Authority | None) -> None:
    with under_attack() as (store, attacker):
        before = attacker.figures()
        assert attacker.send(forged_migrate(attacker, by, Address(2, 8))) == "REFUSED"
        after = attacker.figures()
        assert after["packets_refused"] == before["packets_refused"] + 1
        assert (after["chunks_held"], after["chunks_migrated_in"]) == (before["chunks_held"], 0)
        assert store.lookup([b"p" * 32]) == [Presence.MISS]


def test_a_satellite_without_the_key_cannot_be_one_of_them() -> None:
    """The same MIGRATE with the key is taken, from any sender; but not by a beam with a neighbour's name on it, as
    one that was overheard on a link would have.
    """
    with under_attack() as (_, attacker):
        assert attacker.send(forged_migrate(attacker, Authority(first_ring(MINE)), Address(2, 8))) == "REFUSED"
        assert attacker.figures()["chunks_migrated_in"] == 0
        assert attacker.send(forged_migrate(attacker, Authority(first_ring(MINE)))) == "OK"
        assert attacker.figures()["chunks_migrated_in"] == 1


@pytest.mark.brief(every=3)
@pytest.mark.parametrize("op", [Op.ACK, Op.UNREACHABLE, Op.PRESENCE, Op.DATA])
def test_answers_of_a_ground_host_are_refused_and_divert_nothing(op: Op) -> None:
    """A stranger who speaks as if he answered, for the host that is being served, gets none of its answers."""
    with under_attack() as (store, attacker):
        ground = store._driver.machine.config.ground
        header = SkyHeader(op, Address(*TARGET), Address(2, 8, 0xFF), ground, 0x80000001)
        if op is Op.DATA:
            ref = ChunkRef(b"p" * 32, 0, 1, 3, crc32(b"abc"), 3, crc32(b"abc"), PlacementTag(3, 10, 0, 0, 0)).pack()
            packet = bulk_batch(header, ref, [b"abc"], 0, time.time())
        else:
            packet = single(build_packet(header, bytes(60), 0, time.time()))
        attacker.sock.settimeout(0.2)
        for _ in range(3):
            assert attacker.send(packet) == "nothing"
            assert store.get_many([KEY]) == [VALUE]
        assert attacker.figures()["packets_refused"] == 3 and attacker.figures()["packets_forwarded"] == 0


def test_a_command_overheard_at_one_beam_is_worth_nothing_at_another() -> None:
    """No satellite but its own has seen it, so no window knows it; a second beam would send the answers to any that
    repeats it there.
    """
    with under_attack() as (store, attacker):
        machine, sent = store._driver.machine, list[bytes]()
        original = machine._in_flight._queue_packets

        def overheard(batch: SegmentBatch, beam: SatelliteId, now_s: float) -> None:
            original(batch, beam, now_s)
            if beam != TARGET:
                sent.extend(machine._in_flight.packets[-1][0].datagrams())

        machine._in_flight._queue_packets = overheard
        assert store.get_many([KEY]) == [VALUE] and sent
        machine._in_flight._queue_packets = original
        heard = sent.copy()
        for packet in heard:
            assert attacker.send(single(packet)) == "REFUSED"
        figures = attacker.figures()
        assert (figures["packets_refused"], figures["packets_forwarded"]) == (len(heard), 0)
        assert store.get_many([KEY]) == [VALUE]


def test_a_replayed_eviction_is_dropped_and_counted() -> None:
    with under_attack() as (store, attacker):
        packet = build_packet(attacker.header(Op.EVICT), messages.pack_keys([KEY]), 0, time.time())
        heard = Authority(first_ring(MINE)).sign(single(packet), time.time())
        assert attacker.send(heard) == "OK", "the first time it is its sender's own"
        assert store.put_many([(KEY, VALUE)]) == [True]
        attacker.sock.settimeout(0.3)
        assert attacker.send(heard) == "nothing"
        assert attacker.figures()["packets_replayed"] == 1 and attacker.figures()["packets_refused"] == 0
        assert store.get_many([KEY]) == [VALUE]


def test_a_replayed_read_does_not_turn_answers_to_the_attacker() -> None:
    with under_attack() as (store, attacker):
        machine, sent = store._driver.machine, list[bytes]()
        original = machine._in_flight._queue_packets

        def overheard(batch: SegmentBatch, beam: SatelliteId, now_s: float) -> None:
            original(batch, beam, now_s)
            if beam == TARGET:
                sent.extend(machine._in_flight.packets[-1][0].datagrams())

        machine._in_flight._queue_packets = overheard
        assert store.get_many([KEY]) == [VALUE] and sent
        attacker.sock.settimeout(0.3)
        heard = sent.copy()
        for packet in heard:
            assert attacker.send(single(packet)) == "nothing"
        assert attacker.figures()["packets_replayed"] == len(heard)
        assert store.get_many([KEY]) == [VALUE]


def test_a_client_with_the_wrong_key_stores_and_reads_nothing() -> None:
    with under_attack() as (store, attacker):
        driver = store._driver
        authority = driver.machine.config.authority
        stranger = Authority(first_ring(WRONG))
        driver.machine._in_flight._authority = stranger
        began_s = time.monotonic()
        assert store.get_many([KEY]) == [None] and store.put_many([(b"n" * 32, VALUE)]) == [False]
        assert time.monotonic() - began_s < 5.0, "both are notified at once, and do not wait 5 s each"
        driver.machine._in_flight._authority = authority
        assert attacker.figures()["packets_refused"] > 0
        assert store.get_many([KEY]) == [VALUE]


def test_another_tenants_salt_finds_nothing() -> None:
    tokens = list(range(512))
    mine = CacheContext("m", "w", "t", "float16", "l", tenant_salt=b"mine")
    theirs = CacheContext("m", "w", "t", "float16", "l", tenant_salt=b"theirs")
    my_keys, their_keys = (hash_blocks(context.digest(), tokens, 128) for context in (mine, theirs))
    with under_attack(index=False) as (store, _):
        assert all(store.put_many([(key, os.urandom(9000)) for key in my_keys]))
        assert store.prefix(my_keys) == 4 and store.prefix(their_keys) == 0
        assert store.lookup(their_keys) == [Presence.MISS] * 4
        assert store.get_many(their_keys) == [None] * 4


def test_a_payload_changed_on_a_satellite_is_a_miss_though_all_checksums_are_right() -> None:
    """The satellite itself lies: it stores other bytes, with checksums to match, for every chunk of the value."""
    with under_attack() as (store, _):
        tenant = first_ring(MINE)
        sealed = SealedStore(store, lambda: tenant, time.time)
        assert sealed.put_many([(KEY, VALUE)]) == [True] and sealed.get_many([KEY]) == [VALUE]
        ciphertext = bytearray(store.get_many([KEY])[0] or b"")
        ciphertext[5000] ^= 1
        assert store.put_many([(KEY, ciphertext)]) == [True]
        ticket = sealed.prepare_load([KEY])
        assert sealed.complete_load(ticket) == [None]
        assert ticket.report is not None and ticket.report.keys[0].reason == Miss.NOT_AUTHENTIC
        assert sealed.stats()["values_not_authentic"] == 1


def test_another_tenants_key_opens_nothing() -> None:
    with under_attack() as (store, _):
        mine = SealedStore(store, lambda: first_ring(MINE), time.time)
        theirs = SealedStore(store, lambda: first_ring(WRONG), time.time)
        assert mine.put_many([(KEY, VALUE)]) == [True]
        assert theirs.get_many([KEY]) == [None] and theirs.stats()["values_not_authentic"] == 1
        assert mine.get_many([KEY]) == [VALUE]


@pytest.mark.parametrize("signed_answers", [False, True])
def test_keys_are_rotated_while_reads_go_on_and_then_the_old_one_is_refused(signed_answers: bool) -> None:
    ring = first_ring(MINE)
    with under_attack(ring, signed_answers=signed_answers) as (store, attacker):
        authority = store._driver.machine.config.authority
        old_ring, old = ring, Authority(ring)
        for new_ring in (ring.with_key(NEW, 0.0), ring.with_key(NEW, 0.0).without({1}, time.time())):
            assert store.get_many([KEY]) == [VALUE]
            authority.ring = new_ring  # the satellites' and the client's
            assert store.get_many([KEY]) == [VALUE]
            driver = store._driver
            driver.machine._in_flight._authority = old
            kept = store.get_many([KEY])
            driver.machine._in_flight._authority = authority
            assert (kept == [VALUE]) == (old_ring.keys[0] in new_ring.keys)
        assert attacker.figures()["packets_refused"] > 0 and store.get_many([KEY]) == [VALUE]


def test_a_store_without_an_index_does_all_it_does_with_signed_answers() -> None:
    with under_attack(index=False, signed_answers=True) as (store, _):
        keys = [bytes([number]) * 32 for number in range(3)]
        assert store.put_many([(key, VALUE) for key in keys]) == [True] * 3
        assert store.lookup([*keys, b"?" * 32]) == [Presence.HIT] * 3 + [Presence.MISS] and store.prefix(keys) == 3
        assert store.pin(keys[:1], 60.0) == [True] and store.get_many(keys) == [VALUE] * 3
        assert store.delete(keys[1:]) == [True, True] and store.get_many(keys) == [VALUE, None, None]
        assert NamedValues(store).put("v", VALUE).ok and NamedValues(store).get("v") == VALUE
        counters = store._driver.machine.counters
        assert [counters.get(f"packets_{name}") for name in ("refused", "malformed")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["on", "answers", "every"])
def test_key_rotation_of_running_processes(auth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the file alone: five host processes, a client that reads all the while, nothing started again."""
    from skymemory.cli.main import main
    from skymemory.testbed.connect import open_constellation
    from skymemory.testbed.key_file import read_keys

    run_dir = tmp_path / "run"
    words = ["--run-dir", str(run_dir)]
    assert main(["constellation", "up", "--auth", auth, "--delay", "off", "--base-port", "auto", *words]) == 0
    store = None
    try:
        keys = run_dir / "keys"
        assert keys.stat().st_mode & 0o777 == 0o600
        first = Authority(read_keys(keys))
        store = open_constellation(run_dir)
        assert store.put_many([(KEY, VALUE)]) == [True]
        assert main(["keys", "rotate", str(keys), "--after", "1.5s"]) == 0
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert store.get_many([KEY]) == [VALUE]
        assert main(["keys", "retire", str(keys)]) == 0
        until_s = time.monotonic() + 2.0
        while time.monotonic() < until_s:
            assert store.get_many([KEY]) == [VALUE]
        attacker = Attacker(store)
        packet = build_packet(attacker.header(Op.EVICT), messages.pack_keys([KEY]), 0, time.time())
        assert attacker.send(first.sign(single(packet), time.time())) == "REFUSED", "the first key is retired"
        assert attacker.figures()["packets_refused"] == 1
        attacker.close()
        assert main(["constellation", "status", *words]) == 0 and main(["constellation", "rotate", *words]) == 0
        assert store.get_many([KEY]) == [VALUE]
    finally:
        if store is not None:
            store.close()
        assert main(["constellation", "down", *words]) == 0
    assert not run_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize("auth", ["on", "answers", "every"])
def test_a_client_with_other_keys_than_the_satellites_is_notified(
    auth: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every command: an empty list, "no room" and a silent sky are no answers to who is refused."""
    from skymemory.cli.main import main
    from skymemory.testbed.key_file import write_keys
    from skymemory.testbed.plan_file import save_plan

    folder, words = tmp_path / "plan", ["--run-dir", str(tmp_path / "run")]
    folder.mkdir()
    (tmp_path / "v").write_bytes(VALUE)
    mine = Authority(first_ring(MINE), auth == "every", auth == "answers")
    with udp_sky(mine) as plan:
        store = store_on(plan, SharedIndex(), mine)
        try:
            assert NamedValues(store).put("v", VALUE).ok
            write_keys(first_ring(WRONG), folder / "keys")
            save_plan(replace(plan, auth=auth, keys_file="keys"), folder / "constellation.json")
            assert main(["constellation", "attach", str(folder / "constellation.json"), *words]) == 0
            there = ["--plan", str(folder / "constellation.json")]
            at = ["--store", f"constellation://{tmp_path / 'run'}"]
            for command in (
                ["kv", "list", *at],
                ["kv", "get", "v", "--out", str(tmp_path / "out"), *at],
                ["kv", "delete", "v", *at],
                ["kv", "put", str(tmp_path / "v"), *at],
                ["kv", "pin", "v", *at],
                ["constellation", "status", *there],
                ["constellation", "rotate", *there],
            ):
                capsys.readouterr()
                assert main(command) == 1, command
                said = capsys.readouterr().err
                assert "refuse this computer's commands" in said and "key" in said and "clock" in said, command
            assert not (tmp_path / "out").exists() and NamedValues(store).get("v") == VALUE
        finally:
            store.close()


def test_what_was_refused_is_in_the_status_of_running_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong key, replayed packet, other tenant's salt, forged eviction: each refused, and each counted where an
    operator reads it, in `constellation status --json`, of satellites that are processes of their own.
    """
    from skymemory.cli.main import main
    from skymemory.testbed.connect import open_constellation
    from skymemory.testbed.key_file import read_keys

    words = ["--run-dir", str(tmp_path / "run")]
    up = ["constellation", "up", "--delay", "off", "--base-port", "auto", *words]
    assert main(up) == 0

    def totals() -> dict[str, int]:
        capsys.readouterr()
        assert main(["constellation", "status", "--json", *words]) == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["totals"]
        return found

    store = None
    try:
        store = open_constellation(tmp_path / "run", use_index=False)
        driver, ours = store._driver, Authority(read_keys(tmp_path / "run" / "keys"))
        contexts = [CacheContext("m", "w", "t", "float16", "l", tenant_salt=salt) for salt in (b"mine", b"theirs")]
        (key,), (their_key,) = (hash_blocks(context.digest(), list(range(128)), 128) for context in contexts)
        assert store.put_many([(key, VALUE)]) == [True]
        attacker = Attacker(store)
        before = totals()
        assert (before["packets_refused"], before["packets_replayed"], before["chunks_missed"]) == (0, 0, 0)

        forged = single(build_packet(attacker.header(Op.EVICT), messages.pack_keys([key]), 0, time.time()))
        assert attacker.send(forged) == "REFUSED"
        assert totals()["packets_refused"] == 1, "a forged eviction"

        wrong = Authority(first_ring(WRONG)).sign(forged, time.time())
        assert attacker.send(wrong) == "REFUSED"
        assert totals()["packets_refused"] == 2, "the wrong key"

        ping = single(build_packet(attacker.header(Op.PING), b"", 1, time.time()))
        heard = ours.sign(ping, time.time())
        assert attacker.send(heard) == "OK"
        attacker.sock.settimeout(0.3)
        assert attacker.send(heard) == "nothing"
        assert totals()["packets_replayed"] == 1, "a replayed packet"

        misses = store.stats().get("misses", 0)
        assert store.lookup([their_key]) == [Presence.MISS] and store.get_many([their_key]) == [None]
        assert store.stats()["misses"] == misses + 1
        with driver.lock:  # and past the store, straight at a satellite
            number = driver.machine.ask(Op.GET, Selection.of(their_key, [0, 1], 1).pack(), TARGET, driver.now_s())
            assert driver.run([number])[number].report.failure == "missing"
        after = totals()
        assert after["chunks_missed"] == 2, "another tenant's salt"
        assert (after["packets_refused"], after["packets_replayed"], after["chunks_deleted"]) == (2, 1, 0)
        assert store.get_many([key]) == [VALUE]
        attacker.close()
    finally:
        if store is not None:
            store.close()
        assert main(["constellation", "down", *words]) == 0
