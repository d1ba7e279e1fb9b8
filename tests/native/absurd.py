"""Absurd calls of everything that the helper exports: `python -m tests.native.absurd --calls 1000000`.

Each call begins as a sound one. Then some of its arguments, at any depth, become something else: numbers that are no
sizes, buffers that are read-only or have gaps, other types, and *saboteurs*, objects whose methods change the arguments
while the helper uses them. To refuse is right, with whatever exception. A crash ends the process. A SystemError, or a
result that cannot be read, is a fault, too.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import mmap
import os
import random
import socket
import struct
import sys
import tempfile
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from skymemory.native.twin import backend

Arguments = tuple[Any, ...]
Call = Callable[..., Any]
NUMBERS = (0, 1, 2, 3, 5, 7, 8, 16, 44, 48, 52, 60, 124, 180, -1, -2, 255, 65_535, 65_536, 2**31 - 1, 2**31, -(2**31))
NUMBERS += (2**32 - 1, 2**32, 2**40, 2**61, 2**62, 2**63 - 60, 2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63, 2**64, 10**30)
KEY, CHUNKS, CHUNK_BYTES, VALUE_BYTES = bytes(32), 5, 48, 209
COVERING_KEY = random.Random(1).randbytes(32 + 1040)
TERMS = (0, 0, 9, 1, 2, 3)
SLOT_BYTES = 65_536
_DEEPEST, _MOST_ITEMS = 3, 50


def _reference(index: int, part: bytes, value_crc: int) -> bytes:
    words = (index + 1, CHUNKS, len(part), zlib.crc32(part), VALUE_BYTES, value_crc, 3, index % 3 + 1, 1, 0, 0, 0, 0)
    return struct.pack(">32sIIIIIIHHBBHii", KEY, *words)


def _packet(sky: int, op: int, body: bytes, payload: bytes = b"") -> bytes:
    """A sealed packet for request 0, a command (SKY header at 8) or telemetry (at 16)."""
    word = 0x18C0 if sky == 8 else 0x08C0
    packet = bytearray(struct.pack(">HHH", word, 0xC000, sky + 44 + len(body + payload) - 7) + bytes(sky - 6 + 44))
    packet[sky], packet[sky + 1], packet[sky + 20] = 1, op, 9
    packet += body
    backend.seal_headers(packet, len(packet), sky)
    return bytes(packet) + payload


class Scene:
    """What the calls work on: sockets of its own, packets, tables; and the arguments of the call that runs."""

    def __init__(self, helper: ModuleType, dice: random.Random, folder: Path, saboteurs: bool = True) -> None:
        self.helper, self.dice, self.saboteurs = helper, dice, saboteurs
        self.receiver, self.sender = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        self.receiver.bind(("127.0.0.1", 0))
        self.receiver.setblocking(False)
        self.port = self.receiver.getsockname()[1]
        self.stream, self.peer = socket.socketpair()
        for end in (self.stream, self.peer):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 1000))
        self.scratch = bytearray(2 * SLOT_BYTES)
        self.path = str(folder / "value")
        Path(self.path).write_bytes(bytes(100))
        self.value = bytes(range(VALUE_BYTES))
        self.value_crc = zlib.crc32(self.value)
        parts = [self.value[at : at + CHUNK_BYTES] for at in range(0, VALUE_BYTES, CHUNK_BYTES)]
        self.refs = [_reference(index, part, self.value_crc) for index, part in enumerate(parts)]
        self.parts = parts
        self.answers = b"".join(_packet(16, 0x42, ref, part) for ref, part in zip(self.refs, parts, strict=True))
        self.sets = b"".join(_packet(8, 1, ref, part) for ref, part in zip(self.refs[:4], parts, strict=False))
        self.set_bytes = len(self.sets) // 4
        self.page = folder / "page"
        self._page()
        self.get = _packet(8, 2, KEY + struct.pack(">III", 1, 1, 4) + b"\x0f")
        self.ack = _packet(16, 0x41, KEY + struct.pack(">III", 1, 3, 9) + b"\xff\x01")
        signed = backend.sign_packets
        self.signed_get = bytes(signed(self.get, len(self.get), 8, KEY, 1, 5))
        heads = b"".join(_packet(8, 1, ref) for ref in self.refs[:1])
        self.signed_set = bytes(signed(heads, len(heads), 8, KEY, 1, 5)) + parts[0]
        self.heads = heads
        self.covered_set = bytes(signed(heads, len(heads), 8, COVERING_KEY, 1, 5, parts[:1])) + parts[0]
        self.victims: list[Any] = []
        self.depth = 0
        self.collecting = False
        """Then lists stay as they are: Python 3.11 itself copies them with an address from before the collection."""
        self.again: Callable[[], Any] = lambda: None
        self.makes = self._calls()

    # --- sound calls ---

    def _landing(self) -> Arguments:
        rows = (bytearray(9), bytearray(100 * 2), 0, 2, 100, 100)
        out = self.dice.choice((bytearray(VALUE_BYTES), rows))
        return KEY, CHUNKS, CHUNK_BYTES, VALUE_BYTES, self.value_crc, out, bytearray(CHUNKS), bytearray(4 * CHUNKS)

    def _shares(self) -> dict[bytes, Any]:
        share = {index: (ref, part) for index, (ref, part) in enumerate(zip(self.refs, self.parts, strict=True))}
        return self.dice.choice((dict, OrderedDict))({KEY: share})

    def _guard(self) -> Any:
        return self.dice.choice((None, ({1: KEY}, 5, 99, lambda *_: True, 1), ({1: KEY}, 5, 99, self.saboteur(), 0)))

    def _transit(self) -> Any:
        far = ("127.0.0.1", self.port)
        routes = {there | came << 24: (0, 1) for there in range(3) for came in range(3)}
        return self.dice.choice((None, (routes, {0: far}, {(0, 1): far}), (routes, {}, {})))

    def _settled(self) -> set[bytes]:
        return {ref[56:72] for ref in self.refs}

    def _arrive(self) -> None:
        for _ in range(self.dice.randrange(3)):
            packets = (self.get, self.sets[: self.set_bytes], self.signed_get, self.signed_set, self.answers[:180])
            packet = bytearray(self.dice.choice(packets))
            if self.dice.random() < 0.3:
                packet[self.dice.randrange(len(packet))] ^= 1 << self.dice.randrange(8)
            if self.dice.random() < 0.3:
                packet[15] = 1
            self.sender.sendto(packet, ("127.0.0.1", self.port))

    def _serve(self) -> Arguments:
        self._arrive()
        near = {("127.0.0.1", self.sender.getsockname()[1]): (0, 1)} if self.dice.random() < 0.5 else {}
        return self.receiver.fileno(), self.scratch, 2, near, self._requests(), self._transit()

    def _requests(self) -> Arguments:
        room = self.dice.choice((0, 9999))
        return bytes(8), self._shares(), self._settled(), room, TERMS, self._guard()

    def _serve_runs(self) -> Arguments:
        scratch, runs = bytearray(), []
        for packet in self.dice.choices(
            (self.get, self.sets, self.signed_get, self.signed_set), k=self.dice.randrange(4)
        ):
            moved = bytearray(packet)
            moved[15] = self.dice.choice((0, 0, 1))
            runs.append((len(scratch), len(moved), self.set_bytes if packet is self.sets else len(moved)))
            scratch += moved
        source = self.dice.choice(((0, 1), ("127.0.0.1", 9)))
        return self.sender.fileno(), scratch, runs, source, self._requests(), self._transit()

    def _receive(self) -> Arguments:
        with suppress(BlockingIOError):  # what earlier calls left
            self.stream.recv(SLOT_BYTES, socket.MSG_DONTWAIT)
        self.peer.send(b"some bytes")
        return self.stream.fileno(), b"head", 4, 0.001, bytearray(6)

    def _received(self) -> Arguments:
        self.sender.sendto(self.answers[:180], ("127.0.0.1", self.port))
        view = memoryview(self.scratch)
        return self.receiver.fileno(), view, 2, 3, self.dice.choice((0, 5, 50)), {0: self._landing()}

    def _frames(self) -> bytes:
        hashes, rows = bytes(range(32)), bytes(36)
        body = struct.pack("<III32s", 0, 1, 1, bytes(32)) + b"{}" + hashes + rows
        head = bytes((0x5B, 1, 1, 0)) + struct.pack("<I", len(body))
        return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head + bytes(4)))) + body

    def _page(self) -> mmap.mmap:
        """A client's, with a slot that is full, two with room and an empty one."""
        data = bytearray(struct.pack("<8sQQQQQQ", b"HSKPAGE2", 8, 4, 0, 0, 4, 1).ljust(8192, b"\0"))
        for at, (state, offset, room_bytes) in enumerate(
            ((2, 8192, 64), (5, 16_384, 20_032), (9, 65_536, 64), (4, 0, 0))
        ):
            struct.pack_into(
                "<4Q32s5Q", data, 4096 + 128 + 128 * at, state, offset, room_bytes, 1, bytes(32), 50, 7, 1, 3, 0
            )
        self.page.write_bytes(data)
        with open(self.page, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def _directory(self) -> mmap.mmap:
        """A host arena's, with values under three keys."""
        directory = mmap.mmap(-1, 4096 + 4 * 64 + 72 * 16)
        struct.pack_into("<8sQQQQQ16sQ", directory, 0, b"SKYHOST2", 1 << 20, 16, 64, 5, 0, bytes(16), 0)
        owner = self.helper.HostDirectory(directory)
        for number in range(3):
            owner.put(bytes([number]) * 32, 4096 * number, 4000, 7)
        return directory

    def _servers(self) -> list[Any]:
        return [Server(slot) for slot in (0, 1, 70)] + (
            [Server(2, self.saboteur())] if self.dice.random() < 0.3 else []
        )

    def _calls(self) -> dict[str, Callable[[], tuple[Call, Arguments]]]:
        """By name, how to make a sound call: what is called, and fresh arguments."""
        fast, port, host = self.helper, self.port, "127.0.0.1"
        sending, blocks, answers, terms = self.sender.fileno(), bytes(range(64)), self.answers, TERMS
        plain: dict[str, Callable[[], Arguments]] = {
            "crc32": lambda: (bytearray(b"abc" * 40), 5),
            "pairs_into": lambda: ([],),
            "cut_texts": lambda: (b'{"prompt": "%b"}' % (b"x" * 600),),
            "json_counts": lambda: (bytearray(b'{"prompt": ["a", [1, 2]]}' * 4),),
            "crc32_combine": lambda: (1, 2, 3),
            "crc32_chunks": lambda: (self.value, CHUNK_BYTES),
            "crc32_join": lambda: (bytes(4 * CHUNKS), CHUNK_BYTES, VALUE_BYTES),
            "crc_kind": tuple,
            "crc_select": lambda: ("best",),
            "sha_ready": tuple,
            "sha_select": lambda: (True,),
            "sign_packets": lambda: self.dice.choice(
                (
                    (self.get * 2, len(self.get), 8, KEY, 1, 5),
                    (self.heads * 2, len(self.heads), 8, COVERING_KEY, 1, 5, [self.parts[0]] * 2),
                )
            ),
            "check_macs": lambda: self.dice.choice(
                (
                    (self.signed_get * 2, len(self.signed_get), 8, {1: KEY}, 5, 9),
                    (self.covered_set * 2, len(self.covered_set), 8, {1: COVERING_KEY}, 5, 9),
                )
            ),
            "strip_macs": lambda: (self.signed_get * 2, len(self.signed_get), 8, b"\1\0"),
            "seal_headers": lambda: (bytearray(104), 52, 8),
            "verify_segments": lambda: (bytearray(answers), 180),
            "place_segments": lambda: (bytearray(answers), 180, self._landing()),
            "bulk_headers": lambda: (bytes(60), bytearray(144), 7, 16),
            "value_refs": lambda: (self.value, KEY, CHUNK_BYTES, 3, 1, (0, 0)),
            "answer_get": lambda: (self.get, self._shares(), terms),
            "open_runs": lambda: ([(bytearray(self.sets), self.set_bytes), (memoryview(self.sets), 9)], 0),
            "serve": self._serve,
            "serve_runs": self._serve_runs,
            "same_journey": lambda: (self.sets, self.set_bytes),
            "count_hops": lambda: (self.sets, self.set_bytes),
            "place_runs": lambda: ([(bytearray(answers), 180), (answers, 180)], 0, {0: self._landing(), 1: None}),
            "recv_runs": self._received,
            "recv_batch": lambda: (self.receiver.fileno(), self.scratch, 2),
            "receive_all": self._receive,
            "read_cached": lambda: (self.path, bytearray(40), bytearray(60)),
            "request_words": lambda: (bytearray(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"), 0, 0, 9, 99, 99),
            "send_batch": lambda: (sending, host, port, bytearray(24), 12, [b"one", bytearray(3)]),
            "command_packets": lambda: (bytes(52), 7, [(1, 2, 3, b"body"), (1, 2, 3, bytearray(9))]),
            "open_ack": lambda: (bytearray(self.ack),),
            "send_slices": lambda: (sending, host, port, bytearray(24), 12, (self.value, CHUNK_BYTES, 0, 3)),
            "send_each": lambda: (sending, [(b"one", host, port), (bytearray(3), host, port)], 0),
            "chain_hashes": lambda: (self.value, 16, 5),
            "piece_hashes": lambda: (self.value, 16, 5),
            "chain_sha256": lambda: (self.value, 16, KEY),
            "pack_tokens": lambda: ([1, 2, 2**32 - 1],),
            "fit_prefills": lambda: ([(float(at), 0.0, at * 1e-3) for at in range(9, 14)], 0.0),
            "fit_whole": lambda: ([(float(at), 0.0, 5.0 * at % 7, at * 1e-3) for at in range(9, 14)],),
            "first_values": lambda: ([(b"Name", b"value"), (b"name", b"other")],),
            "header_lines": lambda: ([(b"Name", b"value"), (b"other", b"")], {b"other"}),
            "BlockTable": tuple,
            "PrefixTable": lambda: (50, 3),
            "HolderTable": lambda: (3,),
            "UnderWay": lambda: (50, 3),
            "PrefillQueues": lambda: (0.1,),
            "ShareGuard": lambda: (1.1, 60.0, 1, 0.0),
            "DelayPrice": lambda: (0.3, 60.0, 0.9),
            "HostDirectory": lambda: (self._directory(),),
            "HostView": tuple,
            "HostRoom": tuple,
            "HostReader": lambda: (self._directory(), mmap.mmap(-1, 1 << 20), os.open(self.page, os.O_RDWR)),
            "TtftRanker": lambda: (
                fast.PrefillQueues(0.1),
                fast.ShareGuard(1.1, 60.0, 1, 0.0),
                fast.UnderWay(5),
                0,
                0.0,
            ),
        }
        makes = {name: (lambda name=name, make=make: (getattr(fast, name), make())) for name, make in plain.items()}

        def method(kind: str, name: str, make: Callable[[], Arguments], fill: Callable[[Any], Any]) -> None:
            def sound() -> tuple[Call, Arguments]:
                table = getattr(fast, kind)(*plain[kind]())
                fill(table)
                if kind == "TtftRanker":
                    return table.rank, make()
                return getattr(table, name), make()

            makes[f"{kind}.{name}"] = sound

        def chain(table: Any) -> None:
            table.enter(blocks, bytes(72), 0, None)

        for name, make in {
            "enter": lambda: (bytearray(blocks), bytearray(72), 0, None),
            "remove": lambda: (blocks[:32],),
            "find": lambda: ([blocks[:32], blocks[32:], "x"] * self.dice.choice((1, 30)),),
            "leading": lambda: ([blocks[:32], blocks[32:]],),
            "place": lambda: (blocks[32:],),
            "below": lambda: (blocks[32:],),
            "group_bytes": tuple,
            "items": tuple,
            "runs": lambda: (self.saboteur(),),
            "replay": lambda: (bytearray(self._frames() * 2), 0, self.dice.choice((lambda *_: [0], self.saboteur()))),
            "clear": tuple,
            "__sizeof__": tuple,
            "__len__": tuple,
        }.items():
            method("BlockTable", name, make, chain)
        for name, make in {
            "match": lambda: (bytearray(blocks), [0, 1, 70]),
            "learn": lambda: (1, bytearray(blocks)),
            "drop": lambda: (0, int.from_bytes(blocks[:8], sys.byteorder)),
            "forget": lambda: (0,),
            "set_capacity": lambda: (0, 3),
            "capacity": lambda: (0,),
            "block_count": lambda: (0,),
            "oldest": lambda: (0,),
            "ages": tuple,
            "used_every": lambda: (0, bytearray(blocks), 5),
            "blocks": tuple,
            "changes": tuple,
            "dump": lambda: (0,),
            "load": lambda: (1, bytearray(struct.pack("=QII", 9, 2**32 - 1, 0))),
            "__sizeof__": tuple,
        }.items():
            method("PrefixTable", name, make, lambda table: table.learn(0, blocks))
        for name, make in {
            "add": lambda: (0, 1, 9),
            "take": lambda: (0, 0, 9),
            "add_all": lambda: (1, 2, bytearray(blocks)),
            "take_all": lambda: (0, 0, bytearray(blocks)),
            "match": lambda: (bytearray(blocks), [0, 1, 70], [(0, 1.0), (1, 0.5)]),
            "blocks": tuple,
            "__sizeof__": tuple,
        }.items():
            method("HolderTable", name, make, lambda table: table.add_all(0, 0, blocks))
        for name, make in {
            "add": lambda: (1, bytearray(blocks)),
            "drop": lambda: (1 << 32 | 1,),
            "forget": lambda: (0,),
            "depths": lambda: (bytearray(blocks), [0, 1, 70]),
            "blocks": tuple,
            "changes": tuple,
            "__sizeof__": tuple,
            "__len__": tuple,
        }.items():
            method("UnderWay", name, make, lambda tree: tree.add(0, bytearray(blocks)))
        for name, make in {
            "waits_s": lambda: (self._servers(), 2.0),
            "add": lambda: (1, 0.5, 2.0, 0.1, True),
            "remove": lambda: (0, 1 << 32 | 1, 3.0),
            "forget": lambda: (0,),
        }.items():
            method("PrefillQueues", name, make, lambda queues: queues.add(0, 0.5, 1.0))
        for name, make in {"over": lambda: (0, 3, 2.0), "sent": lambda: (1, 2.0), "forget": lambda: (0,)}.items():
            method("ShareGuard", name, make, lambda guard: guard.sent(0, 1.0))
        for name, make in {"sent": lambda: (0.5, 1.0), "rate": lambda: (3, 2.0)}.items():
            method("DelayPrice", name, make, lambda price: price.sent(0.5, 1.0))

        def ranked() -> Arguments:
            servers = self._servers()
            held = fast.PrefixTable(50)
            held.learn(0, blocks)
            hear = self.dice.choice((lambda servers: None, self.saboteur()))
            curves = struct.pack("=3d", 0.1, 1e-3, 0.0) * 2
            return (
                self.dice.choice((held, [3] * len(servers))),
                bytearray(blocks),
                64,
                16.0,
                servers,
                2.0,
                0.1,
                curves,
                struct.pack("=6d", 0.1, 0.1, 0.1, 0.1, 0.5, 1.0),
                9.0,
                hear,
            )

        def stored(directory: Any) -> None:
            for number in range(3):
                directory.put(bytes([number]) * 32, 64 * number, 50, 7)

        for name, make in {
            "put": lambda: (bytes(32), 64, 50, 7),
            "take": lambda: (bytes(32),),
            "mark_checked": lambda: (bytes(32), 0),
            "set_end": lambda: (bytes(32), 0, 1 << 60),
            "entries": tuple,
            "held_offsets": lambda: ([self._page(), self._page()],),
            "uses": lambda: (self._page(), 0),
            "set_awake": lambda: (True,),
            "give_room": lambda: (self._page(), 3, 4096, 64),
            "take_room": lambda: (self._page(), 1),
            "posted": lambda: ([self._page(), self._page()],),
            "posts": lambda: (self._page(),),
            "end_post": lambda: (self._page(), 0),
        }.items():
            method("HostDirectory", name, make, stored)
        for name, make in {
            "hold": lambda: ([bytes(32), b"\1" * 32, b"\2" * 32],),
            "sizes": lambda: ([bytes(32), b"\1" * 32],),
            "prefix": lambda: ([bytes(32), b"\1" * 32],),
            "write": lambda: (4096, bytearray(20_000), 1),
            "room": lambda: (4096, 20_000, 1),
            "store": lambda: (
                bytes(32),
                bytearray(self.dice.choice((50, 20_000))),
                1,
                3,
                self.dice.choice((None, bytes(32))),
            ),
            "populate": lambda: (0, 8192),
            "renew": tuple,
            "let_go": tuple,
        }.items():
            method("HostReader", name, make, lambda reader: None)

        def view() -> tuple[Call, Arguments]:
            reader = fast.HostReader(*plain["HostReader"]())
            return reader.hold([bytes(32)])[0].is_sound, ()

        def room() -> tuple[Call, Arguments]:
            reader = fast.HostReader(*plain["HostReader"]())
            return reader.room(4096, 20_000, reader.grant).crc, (None,)

        makes["HostView.is_sound"] = view
        makes["HostRoom.crc"] = room
        method("TtftRanker", "rank", ranked, lambda ranker: None)
        method("TtftRanker", "forget", lambda: (0,), lambda ranker: None)
        makes["TtftRanker.forget"] = lambda: (fast.TtftRanker(*plain["TtftRanker"]()).forget, (0,))
        return makes

    # --- absurd ones ---

    def saboteur(self) -> Any:
        return Saboteur(self) if self.saboteurs else None

    def sabotage(self) -> None:
        """Change something that the call uses, as other code may while it runs."""
        if self.depth >= _DEEPEST:
            return
        self.depth += 1
        try:
            for _ in range(self.dice.randrange(1, 3)):
                self._harm(self.dice.choice(self.victims) if self.victims else None)
        except Exception:  # it cannot be changed just now: a held buffer, a view that is released
            pass
        finally:
            self.depth -= 1

    def _harm(self, victim: Any) -> None:
        which = self.dice.random()
        if which < 0.05:
            gc.collect()
        elif which < 0.1:
            self.again()
        elif isinstance(victim, list):
            if self.collecting:
                return
            self.dice.choice((victim.clear, victim.pop, lambda: victim.append(self.absurd()), victim.reverse))()
        elif isinstance(victim, dict):
            keys = (
                (0, 1, KEY)
                if isinstance(victim, OrderedDict)
                else (0, KEY, Saboteur(self, hash(KEY)), Saboteur(self, 0))
            )
            key = self.dice.choice(keys)
            changes = (lambda: _empty(victim), victim.popitem, lambda: victim.__setitem__(key, self.absurd()))
            self.dice.choice(changes)()
        elif isinstance(victim, set):
            self.dice.choice((victim.clear, lambda: victim.add(self.saboteur())))()
        elif isinstance(victim, bytearray):
            at = self.dice.randrange(len(victim) or 1)
            changes = (victim.clear, lambda: victim.extend(bytes(9)), lambda: victim.__setitem__(at, 255))
            self.dice.choice(changes)()
        elif isinstance(victim, memoryview):
            victim.release()
        elif isinstance(victim, Server):
            victim.reported = self.dice.choice((None, Report(), self.saboteur()))
        elif callable(victim):  # a method of the same table
            victim(*self.dice.choice(((), (0,), (0, bytes(64)), (bytes(range(32)),))))

    def absurd(self) -> Any:
        dice = self.dice
        which = dice.randrange(14)
        if which < 4:
            return dice.choice(NUMBERS)
        if which < 6:
            return self.saboteur()
        data = bytes(dice.choice((0, 1, 8, 31, 32, 52, 64, 72, 124, 209, 1000)))
        return (
            lambda: data,
            lambda: bytearray(data),
            lambda: memoryview(data),
            lambda: memoryview(bytearray(data))[:: dice.choice((2, -1))],
            lambda: memoryview(bytearray(64)).cast("I", (4, 4)),
            lambda: array("Q", range(9)),
            lambda: dice.choice((None, "", "no", "127.0.0.1", "\0", "\ud800", 1.5, math.nan, math.inf, -1e300, True)),
            lambda: dice.choice(([], (), {}, set(), [()], (0,) * 3, {0: 0}, [self.saboteur()], (self.saboteur(),) * 3)),
        )[which - 6]()

    def spoilt(self, given: Any, chance: float, depth: int = 0) -> Any:
        """A copy of an argument of which each part, at any depth, may have become something else."""
        if self.dice.random() < chance:
            return self.absurd()
        if depth < 4 and type(given) is tuple:
            return tuple(self.spoilt(part, chance, depth + 1) for part in given)
        if depth < 4 and type(given) is list:
            return [self.spoilt(part, chance, depth + 1) for part in given]
        if depth < 4 and type(given) in (dict, OrderedDict):
            copy = type(given)((key, self.spoilt(part, chance, depth + 1)) for key, part in given.items())
            if self.saboteurs and type(given) is dict and self.dice.random() < chance:
                copy[Saboteur(self, self.dice.choice((0, 1, hash(KEY))))] = self.saboteur()
            return copy
        if self.saboteurs and depth < 4 and type(given) is set and self.dice.random() < chance:
            return {*given, Saboteur(self, hash(next(iter(given), 0)))}
        return given

    def parts_of(self, given: Any, depth: int = 0) -> Iterator[Any]:
        """What other code could change of an argument."""
        if isinstance(given, (list, dict, set, bytearray, memoryview, Server)):
            yield given
        if depth < 4 and isinstance(given, (list, tuple, dict)):
            for part in list(dict.values(given) if isinstance(given, dict) else given)[:_MOST_ITEMS]:
                yield from self.parts_of(part, depth + 1)

    def made(self, name: str) -> tuple[Call, Arguments]:
        """What is called, and with which arguments."""
        function, sound = self.makes[name]()
        given = self.spoilt(sound, self.dice.choice((0.0, 0.05, 0.2, 0.5)))
        if not isinstance(given, tuple):
            given = (given,)
        if self.dice.random() < 0.02:
            given = given[: self.dice.randrange(len(given) + 1)]
        if name in _SENDERS:  # to no port of another process, and from no descriptor that is not a socket of ours
            given = tuple(
                now if at > 2 or (isinstance(now, int) and not 0 <= now < SLOT_BYTES) or now == was else was
                for at, (now, was) in enumerate(zip(given, sound, strict=False))
            )
        return function, given

    def call(self, name: str) -> None:
        """One absurd call."""
        function, given = self.made(name)
        table = getattr(function, "__self__", None)
        methods = [] if isinstance(table, (ModuleType, type(None))) else _methods(table)
        self.victims = [*self.parts_of(given), *methods]
        self.again = lambda: function(*given)
        collect = self.dice.random() < 0.02
        if collect:
            gc.callbacks.append(self._collected)
            gc.set_threshold(1)
        try:
            result = function(*given)
        except SystemError:
            raise
        except Exception:
            return
        finally:
            if collect:
                gc.callbacks.remove(self._collected)
                gc.set_threshold(700, 10, 10)
            self.victims, self.again = [], lambda: None
        repr(result)

    def _collected(self, phase: str, info: object) -> None:
        if phase == "start":
            self.collecting = True
            self.sabotage()
            self.collecting = False


def _empty(victim: dict[Any, Any]) -> None:
    """Unlike ``clear``: Python 3.11 itself inserts wrongly into a dict that a comparison of keys has cleared."""
    while victim:
        victim.popitem()


_SENDERS = {"send_batch", "send_slices", "send_each"}


def _methods(table: Any) -> list[Any]:
    return [getattr(table, name) for name in dir(table) if not name.startswith("__") and callable(getattr(table, name))]


class Saboteur:
    """Does harm whenever it is asked anything, and then answers like some object or other."""

    def __init__(self, scene: Scene, its_hash: int | None = None) -> None:
        self._scene, self._hash = scene, its_hash

    def _number(self) -> int:
        self._scene.sabotage()
        return self._scene.dice.choice(NUMBERS)

    def __index__(self) -> int:
        return self._number()

    def __float__(self) -> float:
        return float(self._number())

    def __bool__(self) -> bool:
        return self._number() % 2 == 0

    def __len__(self) -> int:  # of some size, Python itself would make room for so many before it asks for one
        number = self._number()
        return number if number <= SLOT_BYTES or number > 2**61 else 9

    def __hash__(self) -> int:
        return id(self) >> 4 if self._hash is None else self._hash

    def __eq__(self, other: object) -> bool:
        return self._number() % 3 == 0

    def __str__(self) -> str:
        self._scene.sabotage()
        return "a saboteur"

    def __fspath__(self) -> str:
        self._scene.sabotage()
        return self._scene.path

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._number() % 5):
            yield self._scene.absurd()
            self._scene.sabotage()

    def __call__(self, *given: Any) -> Any:
        self._scene.victims += self._scene.parts_of(given)
        self._scene.sabotage()
        return self._scene.absurd()

    def __buffer__(self, flags: int) -> memoryview:
        self._scene.sabotage()
        return memoryview(bytearray(self._number() % 999))

    def __release_buffer__(self, view: memoryview) -> None:
        self._scene.sabotage()
        view.release()

    def __getattr__(self, name: str) -> Any:
        if name in ("slot", "reported", "at_s", "waiting"):
            self._scene.sabotage()
            return self._scene.absurd()
        raise AttributeError(name)

    def __del__(self) -> None:
        self._scene.sabotage()


class Report:
    at_s, waiting = 1.0, 2


class Server:
    """As the router has them."""

    def __init__(self, slot: int, reported: Any = None) -> None:
        self.slot, self.reported = slot, reported


def exported(helper: ModuleType) -> set[str]:
    """Functions, types, and the methods of types."""
    names = {name for name in dir(helper) if not name.startswith("__")}
    methods = {
        f"{name}.{method}"
        for name in names
        if isinstance(kind := getattr(helper, name), type)
        for method in vars(kind)
        if callable(getattr(kind, method)) and method not in ("__new__", "__init__", "__doc__", "__module__")
    }
    return names | methods


def load(path: str) -> ModuleType:
    """The helper from a file, whichever was built into the package."""
    spec = importlib.util.spec_from_file_location("_fast", path)
    assert spec is not None
    assert spec.loader is not None
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    return helper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--helper", help="the file of the compiled helper; without: the package's")
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    options = parser.parse_args()
    if options.helper is None:
        from skymemory.native import _fast as helper
    else:
        helper = load(options.helper)
    with tempfile.TemporaryDirectory() as folder:
        dice = random.Random(options.seed)
        scene = Scene(helper, dice, Path(folder))
        gc.collect()
        gc.freeze()  # so that the collector looks only at what the calls make, and may run often
        names = sorted(name for name in scene.makes if options.only in name)
        for number in range(options.calls):
            name = names[number % len(names)]
            try:
                scene.call(name)
            except SystemError as error:
                raise SystemExit(
                    f"call {number} of seed {options.seed}, {name}: {error!r}, {error.__cause__!r}"
                ) from error
    print(f"{options.calls} calls of {len(names)} kinds")


if __name__ == "__main__":
    main()
