"""The compiled helper under AddressSanitizer and UndefinedBehaviorSanitizer, fed with hostile input."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import skymemory.native

SOURCES = Path(skymemory.native.__file__).parent
FUZZ = """
import importlib.util, itertools, random, socket, struct, sys, zlib
spec = importlib.util.spec_from_file_location("_fast", sys.argv[1])
fast = importlib.util.module_from_spec(spec); spec.loader.exec_module(fast)
dice = random.Random(5)
for kind in ("tables", "pclmul", "vpclmul"):
    if fast.crc_select(kind):
        for length in range(600):
            data = dice.randbytes(length)
            assert fast.crc32(data) == zlib.crc32(data)
fast.crc_select("best")
key, chunks, chunk, size = bytes(32), 5, 48, 209
value = dice.randbytes(size); crc = zlib.crc32(value)
sums = fast.crc32_chunks(value, chunk)
assert fast.crc32_join(sums, chunk, size) == crc
def data(i, part=None):
    part = value[i * chunk : (i + 1) * chunk] if part is None else part
    words = (i + 1, chunks, len(part), zlib.crc32(part), size, crc, 3, 1, 1, 0, 0, 0, 0)
    ref = struct.pack(">32sIIIIIIHHBBHii", key, *words)
    packet = bytearray(struct.pack(">HHHIHI", 0x08C0, 0xC000, 132 + len(part) - 7, 0, 0, 0) + bytes(44) + ref)
    packet[16], packet[17] = 1, 0x42
    fast.seal_headers(packet, 132, 16)
    return packet + part
out, arrived, crcs = bytearray(size), bytearray(chunks), bytearray(4 * chunks)
run = b"".join(data(i) for i in range(chunks))
landing = key, chunks, chunk, size, crc, out, arrived, crcs
assert fast.place_segments(run, 180, landing) == (5, 0, 0, 0) and out == value
for _ in range(20000):
    packet = data(dice.randrange(chunks), dice.choice((None, None, dice.randbytes(dice.randrange(200)))))
    for _ in range(dice.randrange(4)):
        packet[dice.randrange(len(packet))] = dice.choice((0, 1, 255, dice.randrange(256)))
    if dice.random() < 0.3:
        struct.pack_into(">I", packet, 60 + dice.choice((32, 36, 40, 48)), dice.choice((0, 6, 2**31, 2**32 - 1)))
    if dice.random() < 0.7 and len(packet) >= 132:
        head = packet[:132]; fast.seal_headers(head, 132, 16); packet[:132] = head
    if dice.random() < 0.3:
        packet = packet[: dice.randrange(len(packet) + 1)]
        if len(packet) >= 7 and dice.random() < 0.7:
            struct.pack_into(">H", packet, 4, len(packet) - 7)
    packet = bytes(packet)
    arrived = bytearray(chunks)
    segment = dice.choice((180, len(packet) or 1, dice.randrange(1, 200)))
    fast.verify_segments(packet, segment)
    fast.place_segments(packet, segment, (key, chunks, chunk, size, crc, out, arrived, crcs))
    awaited = {0: (key, chunks, chunk, size, crc, out, bytearray(chunks), crcs)}
    fast.place_runs([(run, 180), (packet, segment), (run, 180)], 0, awaited)
    fast.open_ack(packet)
def ack(bits, tail):
    body = key + struct.pack(">III", 1, 3, bits) + tail
    packet = bytearray(struct.pack(">HHHIHI", 0x08C0, 0xC000, 60 + len(body) - 7, 0, 0, 0) + bytes(44) + body)
    packet[16], packet[17] = 1, 0x41
    fast.seal_headers(packet, len(packet), 16)
    return bytes(packet)
assert fast.open_ack(ack(9, b"\\xff\\x01")) == (0, 0, 0, 0, 0, 0, key, 0, 3, 9)
for _ in range(2000):
    fast.open_ack(ack(dice.choice((0, 1, 8, 65536, 2**32 - 1, dice.randrange(70))), bytes([255]) * dice.randrange(12)))
    rows = [(dice.getrandbits(32), 0, 5, dice.randbytes(dice.randrange(300))) for _ in range(dice.randrange(5))]
    assert len(fast.command_packets(bytes(52), 7, rows)) == len(rows)
for count in (0, 1, 7, 5000, 9000):
    packed = fast.pack_tokens([dice.getrandbits(32) for _ in range(count)])
    assert len(fast.chain_sha256(packed, 28, key)) == 4 * count // 28
a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
a.bind(("127.0.0.1", 0)); a.setsockopt(17, 104, 1); port = a.getsockname()[1]
scratch = bytearray(4 * 65536)
ways = [(b, a)]
try:
    c, d = (socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) for _ in range(2))
    c.bind(("::1", 0)); c.setsockopt(17, 104, 1); ways.append((d, c))
except OSError:
    pass
for (here, there), sizes in itertools.product(ways, ([700] * 90 + [3], [0, 0], [65000], [9, 700, 700], [])):
    rows, (far, far_port) = bytes(12 * len(sizes)), there.getsockname()[:2]
    assert fast.send_batch(here.fileno(), far, far_port, rows, 12, [bytes(n) for n in sizes]) == len(sizes)
    got = 0
    while arrivals := fast.recv_batch(there.fileno(), scratch, 4):
        got += sum(size for _, size, _, _, _ in arrivals)
        assert {host for *_, host, _ in arrivals} == {far}
    assert got == sum(sizes) + len(rows)
whole = memoryview(scratch)
for n in range(60):
    blob = dice.randbytes(dice.randrange(20000))
    rows = bytes(12 * (len(blob) // 1000 // 3 + 1))
    assert fast.send_slices(b.fileno(), "127.0.0.1", port, rows, 12, (blob, 1000, 0, 3)) == len(rows) // 12
    packets = [(dice.choice((run[:180], dice.randbytes(dice.randrange(400)))), "127.0.0.1", port) for _ in range(n)]
    assert fast.send_each(b.fileno(), packets, 0) == n
    awaited = {0: (key, chunks, chunk, size, crc, out, bytearray(chunks), crcs)}
    while any(fast.recv_runs(a.fileno(), whole, 4, 5, dice.randrange(3), awaited)):
        pass
def request(op, i, part, journey=1):
    body = key + struct.pack(">III", i + 1, 1, 1) + b"\\1" if op == 2 else None
    words = (i + 1, chunks, len(part), zlib.crc32(part), size, crc, 3, i % 3 + 1, 1, 0, 0, 0, 0)
    body = body or struct.pack(">32sIIIIIIHHBBHii", key, *words)
    length = 52 + len(body) + (len(part) if op == 1 else 0) - 7
    packet = bytearray(struct.pack(">HHH", 0x18C0, 0xC000, length) + bytes(46))
    packet[8], packet[9], packet[27] = 1, op, journey
    packet += body
    fast.seal_headers(packet, len(packet), 8)
    return bytes(packet + part if op == 1 else packet)
shares, terms, kinds = {}, (0, 0, 9, 1, 2, 3), {1: 0, 2: 0}
settled = {request(1, i, b"")[108:124] for i in range(chunks)}
for _ in range(4000):
    burst = [bytearray(request(dice.choice((1, 1, 2)), dice.randrange(chunks), value[:chunk], dice.randrange(2)))
             for _ in range(dice.randrange(1, 5))]
    for packet in burst:
        if dice.random() < 0.3:
            packet[dice.randrange(len(packet))] = dice.randrange(256)
        if dice.random() < 0.1:
            del packet[dice.randrange(len(packet)) :]
        b.sendto(packet, ("127.0.0.1", port))
    if dice.random() < 0.1:
        shares = {} if dice.random() < 0.5 else {key: {0: dice.choice(("no", ("a", 3), (bytes(72), b"x")))}}
    try:
        room = dice.choice((0, 300, 9999))
        _, served, *_ = fast.serve(a.fileno(), scratch, 4, {}, (bytes(8), shares, settled, room, terms, None))
        for entry in served:
            kinds[entry[0]] += 1
    except TypeError:
        shares = {}
    while fast.recv_batch(a.fileno(), scratch, 4):
        pass
    view = [(memoryview(bytes(packet)), dice.choice((len(packet) or 1, 60, 0))) for packet in burst]
    fast.open_runs(view, dice.randrange(3))
assert min(kinds.values()) > 200, kinds
here, near, far, link = bytes(8), ("127.0.0.1", b.getsockname()[1]), ("127.0.0.1", port), (0, 1)
passing = {to | came << 24: dice.choice((link, (0, 2))) for to in range(3) for came in range(3)}
transit, went = (passing, {0: far, 7: far}, {link: far}), 0
for _ in range(3000):
    moving = b"".join(request(dice.choice((1, 1, 2)), i, value[:chunk], 1) for i in range(dice.randrange(1, 4)))
    moving, segment = bytearray(moving), len(moving) // dice.choice((1, 2, 3))
    for at in range(0, len(moving), dice.choice((segment, len(moving)))):
        moving[at + 15 : at + 16] = bytes((dice.randrange(4),))
        moving[at + 28 : at + 29] = bytes((dice.randrange(3),))
    for _ in range(dice.choice((0, 0, 1, 2))):
        moving[dice.randrange(len(moving))] = dice.randrange(256)
    if dice.random() < 0.2:
        del moving[dice.randrange(len(moving)) :]
    fast.same_journey(moving, segment)
    try:
        fast.count_hops(moving, segment)
    except ValueError:
        pass
    scratch[5 : 5 + len(moving)] = moving
    b.sendto(moving, ("127.0.0.1", port))
    known = {near: link} if dice.random() < 0.7 else {}
    rest = (here, {}, set(), 9, terms, None), transit
    for _, _, _, passed in (
        fast.serve_runs(b.fileno(), scratch, [(5, len(moving), segment)] if moving else [], link, *rest),
        fast.serve(a.fileno(), scratch, 4, known, *rest),
    ):
        went += len(passed)
    while fast.recv_batch(a.fileno(), scratch, 4):
        pass
assert went > 500, went
keys, taken, now = {1: bytes(32), 2: bytes(range(32)), 3: dice.randbytes(1072)}, 0, 1_700_000_000_000_000
shares = {}
for n in range(6000):
    op, i = dice.choice((1, 1, 2)), dice.randrange(chunks)
    plain = request(op, i, value[:chunk])
    head = 124 if op == 1 else len(plain)
    which, when = dice.choice((1, 1, 2, 3)), now + dice.choice((0, 0, n, 2**31, -(2**40)))
    signed = fast.sign_packets(plain[:head], head, 8, keys[which], which, when, [bytes(plain[head:])])
    packet = signed + plain[head:]
    for _ in range(dice.choice((0, 0, 1, 3))):
        packet[dice.randrange(len(packet))] = dice.randrange(256)
    if dice.random() < 0.3:
        fast.seal_headers(packet, len(packet), 8)
    if dice.random() < 0.2:
        del packet[dice.randrange(len(packet)) :]
    data = bytes(packet) * dice.randrange(1, 3)
    segment, sky = dice.choice((len(packet) or 1, 60, 7)), dice.choice((8, 16))
    keep = bytes(time is not None for time in fast.check_macs(data, segment, sky, keys, now, 30_000_000))
    fast.strip_macs(data, segment, sky, keep)
    try:
        fast.strip_macs(data, segment, sky, dice.randbytes(len(keep)))
    except ValueError:
        pass
    for _ in range(dice.randrange(1, 3)):
        b.sendto(packet, ("127.0.0.1", port))
    accepted = dice.choice((keys, keys, {}, {1: b"short", 2: 5}))
    guard = (accepted, now, 30_000_000, dice.choice((bool, lambda *_: True)), n % 4)
    try:
        _, served, *_ = fast.serve(a.fileno(), scratch, 4, {}, (bytes(8), shares, settled, 9999, terms, guard))
        taken += len(served)
    except (KeyError, TypeError):
        pass
    while fast.recv_batch(a.fileno(), scratch, 4):
        pass
assert taken > 200, taken
def hashes(*values):
    return memoryview(b"?" + struct.pack(f"={len(values)}Q", *values))[1:]  # not aligned
for _ in range(3000):
    blob = dice.randbytes(dice.randrange(200))
    size = dice.choice((1, 7, 8, 31, 32, 33, 64, 300))
    for call in (fast.chain_hashes, fast.piece_hashes):
        assert len(call(memoryview(blob)[1:], size, dice.getrandbits(64))) == max(0, len(blob) - 1) // size * 8
assert len(fast.chain_hashes(bytes(70000), 64, 1)) == 70000 // 64 * 8
for most in (0, 1, 9, 100, 3000):
    # Chains that contradict each other, which no prompt makes: answers mean nothing then, and memory is safe.
    table, many = fast.PrefixTable(most, dice.getrandbits(64) | 1), dice.choice((20, 500, 2**64))
    sample = lambda: hashes(*(dice.randrange(many) for _ in range(dice.choice((0, 1, 5, 30, 300)))))
    for _ in range(1500):
        slot, some = dice.choice((0, 1, 63, 64, 300)), sample()
        what = dice.randrange(12)
        if what < 5:
            table.learn(slot, some)
        elif what < 7:
            table.drop(slot, dice.randrange(many))
        elif what == 7 and dice.random() < 0.2:
            table.forget(slot)
        elif what == 8:
            table.set_capacity(slot, dice.randrange(most + 5))
        elif what < 11:
            dump = bytearray(table.dump(slot))
            for _ in range(dice.choice((0, 0, 1, 3)) if dump else 0):
                dump[dice.randrange(len(dump))] = dice.choice((0, 1, 255))
            try:
                table.load(dice.choice((0, 64)), dump[: dice.choice((len(dump), len(dump), 16, 5))])
            except ValueError:
                pass
        assert len(table.match(some, [slot, 0, 64, 299, 5000])) == 5
        assert table.block_count(slot) <= table.capacity(slot) and table.__sizeof__() > 0
    del table
wide = fast.PrefixTable(50)
wide.learn(2, hashes(0, 1, 2)); wide.learn(65535, hashes(0, 1))
assert wide.match(hashes(0, 1, 2), range(65536)).count(2) == 1 and wide.blocks() == 3
del wide
for many in (3, 60, 5000, 2**64):
    table, slots = fast.HolderTable(dice.getrandbits(64) | 1), (0, 1, 63, 64, 300, 65535)
    for _ in range(4000):
        change = (table.add, table.add, table.take)[dice.randrange(3)]
        change(dice.choice((0, 1, 15)), dice.choice(slots[:5]), dice.randrange(many))
        if dice.random() < 0.02:
            change = dice.choice((table.add_all, table.take_all))
            change(1, dice.choice(slots), hashes(*(dice.randrange(many) for _ in range(dice.randrange(40)))))
        if dice.random() < 0.05:
            asked = dice.choices(slots, k=dice.randrange(9))
            media = [(dice.choice((0, 1, 9, 15)), 0.5) for _ in range(dice.choice((0, 1, 3, 16)))]
            some = hashes(*(dice.randrange(many) for _ in range(dice.choice((0, 1, 11, 12, 13, 300)))))
            assert list(map(len, table.match(some, asked, media))) == [len(asked)] * 2
    assert table.blocks() > 0 and table.__sizeof__() > 0
    del table
class Server:
    def __init__(self, slot):
        self.slot, self.reported = slot, None
class Report:
    def __init__(self, at_s, waiting):
        self.at_s, self.waiting = at_s, waiting
class Sly(Server):
    # What is read of it changes what it is read for.
    @property
    def reported(self):
        if dice.random() < 0.2:
            queues.forget(dice.choice((0, 1, 200)))
            queues.add(dice.choice((0, 64, 9000)), 1.0, 1.0)
        return Report(1.0, 2)
    @reported.setter
    def reported(self, report):
        pass
hear = lambda servers: [queues.add(server.slot, 0.5, 3.0) for server in servers]
for many in (3, 9, 60, 2**64):
    # Chains that contradict each other, too.
    under_way, queues = fast.UnderWay(dice.choice((5, 100)), dice.getrandbits(64) | 1), fast.PrefillQueues(0.1)
    guard, table = fast.ShareGuard(1.1, 60.0, 1, 0.0), fast.PrefixTable(50)
    ranker = fast.TtftRanker(queues, guard, under_way, dice.choice((0, 99)), dice.choice((0.0, 0.5)))
    servers = [Server(slot) for slot in (0, 1, 63, 64, 65, 300)] + [Sly(2)]
    sent, now, ranked = [], 0.0, 0
    for _ in range(4000):
        now += dice.random()
        some = hashes(*(dice.randrange(many) for _ in range(dice.choice((0, 1, 5, 30, 200)))))
        what, slot = dice.randrange(12), dice.choice((0, 1, 63, 64, 300, 65535))
        if what < 4:
            work, drain = dice.random(), dice.choice((0.0, 0.1))
            ticket = queues.add(slot, work, now, drain, unseen=dice.random() < 0.5)
            sent.append((slot, ticket, under_way.add(slot, some)))
            guard.sent(slot, now)
        elif what < 7 and sent:
            slot, ticket, chain = sent.pop(dice.randrange(len(sent)))
            queues.remove(dice.choice((slot, slot, 5)), ticket, now)
            under_way.drop(chain)
            if dice.random() < 0.2:
                queues.remove(slot, ticket, now); under_way.drop(chain); under_way.drop(chain ^ 1 << 32)
        elif what == 7:
            dice.choice(servers).reported = dice.choice((None, Report(now, dice.randrange(5))))
        elif what == 8 and dice.random() < 0.1:
            for part in (queues, guard, under_way, ranker):
                part.forget(slot)
        elif what == 9:
            assert len(under_way.depths(some, [0, slot, 65535, 4])) in (0, 4)
        else:
            table.learn(slot % 300, some)
            asked = dice.sample(servers, dice.randrange(1, len(servers) + 1))
            curves = struct.pack("=3d", 0.1, 1e-3, 0.0) * dice.choice((1, 2, 70))
            prices = struct.pack("=6d", 0.1, 0.1, 0.1, 0.1, 1.0, now) * dice.choice((0, 1, 70))
            held = dice.choice((table, [3] * len(asked)))
            best, back, unworthy, scores, figures = ranker.rank(
                held, some, 16 * len(some) // 8, 16.0, asked, now, 0.1, curves, prices, 9.0, hear
            )
            ranked += len(best) and len(scores) * 5 == len(figures) == 40 * len(asked) and 0 <= max(best) < len(asked)
        guard.over(slot, dice.choice((1, 2, 3, 9, 70, 200)), now)
    assert ranked > 500 and len(queues.waits_s(servers, now)) == 7 and under_way.__sizeof__() > 0
    del under_way, guard, ranker
for _ in range(300):
    points = [(float(dice.randrange(1, 9000)), 0.0, dice.random()) for _ in range(dice.choice((1, 2, 3, 16, 65, 300)))]
    assert fast.fit_prefills(points, dice.choice((0.0, 8e-5)))[1] > 0
    if len(points) > 2:
        fast.fit_whole([(tokens, 0.0, float(dice.randrange(3)), taken) for tokens, _, taken in points])
for _ in range(2000):
    came = [(dice.randbytes(dice.randrange(9)), dice.randbytes(dice.randrange(9))) for _ in range(dice.randrange(9))]
    low = {name.lower() for name, _ in came}
    assert set(fast.first_values(came)) == low
    kept = set(dice.sample(sorted(low), dice.randrange(len(low) + 1)))
    lines = (name + b": " + value + b"\\r\\n" for name, value in came if name.lower() in kept)
    assert fast.header_lines(came, low - kept) == b"".join(lines)
    again = []
    list(map(fast.pairs_into(again), *zip(*came))) if came else None
    assert again == came
for _ in range(2000):
    text = bytes(dice.choices(b'"\\\\[]{},a1 ', k=dice.choice((0, 1, 2, 9, 70, 20_000))))
    assert min(fast.json_counts(text)) >= 0 and fast.json_counts(memoryview(text))[4] < max(1, len(text))
    body = b'{"messages": [{"content": "' + b"x" * dice.choice((5, 600, 20_000)) + text
    for cut in fast.cut_texts(body + b'"}]')[1].values():
        assert cut in body and b'"' not in cut and b"\\\\" not in cut
for bad in (lambda: fast.json_counts("a"), lambda: fast.cut_texts("a"), lambda: fast.first_values([(b"a", 5)]),
            lambda: fast.header_lines([(b"a", b"b"), 5], {b"a"}), lambda: fast.pairs_into(()),
            lambda: fast.pairs_into([])(1),
            lambda: fast.UnderWay(5, 4), lambda: fast.UnderWay(-1), lambda: fast.UnderWay(5).add(0, b"x" * 7),
            lambda: fast.UnderWay(5).add("a", b""), lambda: fast.UnderWay(5).drop("a"),
            lambda: fast.UnderWay(5).depths(b"x" * 8, ["a"]), lambda: fast.UnderWay(5).depths(b"x" * 8, 5),
            lambda: fast.PrefillQueues(0.1).waits_s([Server("a")], 0.0),
            lambda: fast.PrefillQueues(0.1).add(0, "a", 0.0), lambda: hear([Server(-1)]),
            lambda: fast.PrefillQueues(0.1).remove(0, "a", 0.0), lambda: fast.ShareGuard(0.5, 60.0, 1, 0.0),
            lambda: fast.TtftRanker(fast.PrefillQueues(0.1), 5, fast.UnderWay(5), 0, 0.0),
            lambda: fast.fit_prefills([(1.0, 0.0)]), lambda: fast.fit_prefills([(1, 0, 1)]),
            lambda: fast.fit_whole([5] * 3), lambda: fast.fit_prefills([(1.0, 0.0, float("nan"))]),
            lambda: fast.PrefixTable(5, 4), lambda: fast.PrefixTable(-1),
            lambda: fast.PrefixTable(2).match(b"x" * 8, 5),
            lambda: fast.PrefixTable(2).match(b"x" * 8, ["a"]), lambda: fast.PrefixTable(2).match(b"x" * 7, [0]),
            lambda: fast.PrefixTable(2).learn(70000, b""), lambda: fast.PrefixTable(2).load(0, b"x" * 15),
            lambda: fast.HolderTable(4), lambda: fast.HolderTable().match(b"x" * 8, [0], [(16, 1.0)]),
            lambda: fast.HolderTable().match(b"x" * 8, [0], [5]), lambda: fast.HolderTable().add(0, 65536, 1),
            lambda: fast.HolderTable().match(b"x" * 8, ["a"], []), lambda: fast.HolderTable().match(b"x" * 7, [], []),
            lambda: fast.chain_sha256(b"x", 0, key), lambda: fast.chain_sha256(b"x", 1, bytes(31)),
            lambda: fast.chain_hashes(b"x", 0, 1), lambda: fast.recv_runs(a.fileno(), whole, 5, 1, 0, {}),
            lambda: fast.place_runs([(run, 180)], 0, {0: (1,)}),
            lambda: fast.send_slices(b.fileno(), "127.0.0.1", port, bytes(24), 12, (b"x", 1, 1, 2**62)),
            lambda: fast.send_each(b.fileno(), [(b"x", "127.0.0.1", port), (b"x", "no", 1)], 0),
            lambda: fast.command_packets(bytes(52), 0, [(1, 2, 3, b""), (1, 2, 3, "x")]),
            lambda: fast.send_batch(b.fileno(), "127.0.0.1", port, bytes(24), 12, [b"", "x"]),
            lambda: fast.send_batch(b.fileno(), "no", port, b"", 1, None), lambda: fast.recv_batch(0, scratch, 5)):
    try:
        bad()
    except (TypeError, ValueError):
        continue
    raise SystemExit("accepted")
print("sound")
"""

ABSURD = """
import importlib.util, itertools, socket, struct, sys
spec = importlib.util.spec_from_file_location("_fast", sys.argv[1])
fast = importlib.util.module_from_spec(spec); spec.loader.exec_module(fast)
numbers = (0, 1, 2, 7, 52, 124, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62)
numbers += (2**63 - 2, 2**63 - 1, -(2**63), 1 - 2**63, 2**64)
a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
a.bind(("127.0.0.1", 0)); a.setblocking(False); port = a.getsockname()[1]
key, value, room = bytes(32), bytes(209), memoryview(bytearray(2 * 65536))
out = bytearray(209), bytearray(5), bytearray(20)
command = bytes((0x18, 0xC0, 0xC0, 0, 0, 61, 0, 0, 1, 6)) + bytes(42)
signed = bytes(fast.sign_packets(command, 52, 8, key, 1, 5))
terms, guarded = (0, 0, 9, 1, 2, 3), (bytes(8), {}, set(), 99)
def guard(now, skew):
    b.sendto(signed, ("127.0.0.1", port))
    fast.serve(a.fileno(), room, 2, {}, (*guarded, terms, ({1: key}, now, skew, bool)))
def table(slot, number):
    table = fast.PrefixTable(5); table.learn(slot, bytes(16)); table.drop(slot, number)
    table.set_capacity(slot, number); table.match(bytes(8), [slot]); table.block_count(slot)
    table.capacity(slot); table.dump(slot); table.forget(slot)
def holders(medium, slot, number):
    table = fast.HolderTable(); table.add(medium, slot, number); table.match(bytes(8), [slot], [(medium, 1.0)])
    table.take(medium, slot, number)
class Server:
    slot, reported = 0, None
def estimates(slot, number):
    under_way, queues, guard = fast.UnderWay(5), fast.PrefillQueues(0.1), fast.ShareGuard(1.0, 60.0, 1, 0.0)
    under_way.add(slot, bytes(16)); queues.add(slot, 1.0, 1.0); guard.sent(slot, 1.0); guard.over(slot, number, 1.0)
    under_way.drop(number); queues.remove(slot, number, 1.0)
    under_way.forget(slot); queues.forget(slot); guard.forget(slot)
def ranking(slot, tokens, block_tokens):
    under_way, queues, guard = fast.UnderWay(5), fast.PrefillQueues(0.1), fast.ShareGuard(1.0, 60.0, 1, 0.0)
    server, table = Server(), fast.PrefixTable(5)
    server.slot = slot
    table.learn(0, bytes(8))
    ranker = fast.TtftRanker(queues, guard, under_way, tokens, 0.0)
    ranker.rank(table, bytes(8), tokens, block_tokens, [server, Server()], 0.0, 0.0, bytes(24), bytes(48), 1.0, print)
calls = [
    (lambda n: fast.crc32(b"abc", n), 1), (fast.crc32_combine, 3), (lambda n: fast.crc32_chunks(value, n), 1),
    (lambda c, s: fast.crc32_join(out[2], c, s), 2), (lambda c, s: fast.crc32_join(bytes(8), c, s), 2),
    (lambda n, s: fast.chain_hashes(value, n, s), 2), (lambda n, s: fast.piece_hashes(value, n, s), 2),
    (lambda n: fast.chain_sha256(value, n, key), 1), (lambda *some: fast.pack_tokens([*some, *some]), 3),
    (lambda w, s: fast.seal_headers(bytearray(104), w, s), 2),
    (lambda w, s: fast.sign_packets(command * 2, w, s, key, 1, 5), 2),
    (lambda k, t: fast.sign_packets(command * 2, 52, 8, key, k, t), 2),
    (lambda n, k: fast.check_macs(signed, 68, 8, {1: key}, n, k), 2),
    (lambda w, s: fast.check_macs(signed, w, s, {1: key}, 5, 9), 2),
    (lambda w, s: fast.strip_macs(signed, w, s, b"1"), 2), (lambda w: fast.verify_segments(signed * 3, w), 1),
    (lambda w, n, c, s: fast.place_segments(signed, w, (key, n, c, s, 0, *out)), 4),
    (lambda n, c, s: fast.place_runs([(signed, 68)], 0, {0: (key, n, c, s, 0, *out)}), 3),
    (lambda w, f: fast.place_runs([(signed, w)], f, {}), 2), (lambda w, f: fast.open_runs([(signed, w)], f), 2),
    (lambda q, s: fast.bulk_headers(bytes(60), bytes(144), q, s), 2),
    (lambda *some: fast.answer_get(signed, {}, (*some, 0, 0)), 4),
    (lambda s, c: fast.recv_runs(a.fileno(), room, s, c, 0, {}), 2),
    (lambda s: fast.recv_batch(a.fileno(), room, s), 1),
    (lambda s, n: fast.serve(a.fileno(), room, s, {}, (bytes(8), {}, set(), n, terms, None)), 2), (guard, 2),
    (lambda p, s, w: fast.serve_runs(a.fileno(), room, [(p, s, w)], (0, 1), (bytes(8), {}, set(), 9, terms, None)), 3),
    (lambda w: fast.same_journey(signed * 3, w), 1), (lambda w: fast.count_hops(signed * 3, w), 1),
    (lambda p, w: fast.send_batch(b.fileno(), "127.0.0.1", p, bytes(24), w, None), 2),
    (lambda p, f: fast.send_each(b.fileno(), [(b"x", "127.0.0.1", p)], f), 2),
    (lambda w, c, f, s: fast.send_slices(b.fileno(), "127.0.0.1", port, bytes(24), w, (value, c, f, s)), 4),
    (lambda q, n: fast.command_packets(bytes(52), q, [(n, n, n, b"")] * 3), 2),
    (lambda c, s: fast.PrefixTable(c, s), 2), (table, 2), (holders, 3),
    (estimates, 2), (ranking, 3), (lambda n: fast.UnderWay(n).add(0, bytes(16)), 1),
    (lambda n: fast.fit_prefills([(float(n), 0.0, 1.0)] * 3), 1), (lambda n: fast.DelayPrice().rate(n, n), 1),
]
for call, arguments in calls:
    for given in itertools.product(numbers, repeat=arguments):
        try:
            call(*given)
        except (TypeError, ValueError, OverflowError, MemoryError, OSError):
            continue
print("sound")
"""


def _built(folder: Path) -> tuple[Path, dict[str, str]]:
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no gcc here")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("this gcc has no AddressSanitizer")
    library = folder / "_fast.so"
    flags = ["-shared", "-fPIC", "-O1", "-g", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip("no Python headers here")
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    built = subprocess.run(
        [compiler, *flags, f"-I{include}", *sources, "-o", str(library), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    options = "detect_leaks=0,allocator_may_return_null=1"
    return library, os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The helper, compiled with both sanitizers, and the environment in which Python can load it."""
    return _built(tmp_path_factory.mktemp("sanitized"))


@pytest.mark.slow
def test_absurd_calls_touch_no_memory_but_their_own(built: tuple[Path, dict[str, str]]) -> None:
    library, environment = built
    command = [sys.executable, "-m", "tests.native.absurd", "--helper", str(library)]
    calls = os.environ.get("ABSURD_CALLS", "200000")
    ran = subprocess.run(
        [*command, "--calls", calls, "--seed", "3"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("source", [FUZZ, ABSURD], ids=["hostile bytes", "absurd numbers"])
def test_hostile_input_touches_no_memory_but_its_own(
    built: tuple[Path, dict[str, str]], tmp_path: Path, source: str
) -> None:
    library, environment = built
    script = tmp_path / "fuzz.py"
    script.write_text(source)
    ran = subprocess.run(
        [sys.executable, str(script), str(library)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "sound"), ran.stderr[-3000:]
