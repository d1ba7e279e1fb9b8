"""Who is where, as the daemon in C knows it: satellites by their addresses, ground hosts of both families by tokens."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.flight.share import library

PLACES = 1 << 14
BEAM = 0xFF000000

Host = tuple[str, int]


def packed(host: Host) -> bytes:
    """As the kernel writes the sender of a packet."""
    address, port = ipaddress.ip_address(host[0]), host[1]
    if address.version == 4:
        return struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + address.packed + bytes(20)
    scope = int(address.scope_id or 0)
    family = struct.pack("=H", socket.AF_INET6)
    return family + struct.pack(">HI", port, 0) + address.packed + struct.pack("=I", scope)


class Endpoints:
    def __init__(self, satellites: dict[Host, int], seed: bytes = bytes(16)) -> None:
        lib: Any = library()
        self.lib, self.it = lib, ctypes.c_void_p(lib.endpoints_new(len(satellites), seed))
        for host, link in satellites.items():
            lib.endpoints_add(self.it, link, packed(host))

    def link(self, host: Host) -> int:
        return int(self.lib.endpoints_link(self.it, packed(host)))

    def _found(self, find: Any, link: int) -> bytes | None:
        room = ctypes.create_string_buffer(28)
        return room.raw if find(self.it, link, room) else None

    def ground(self, link: int) -> bytes | None:
        return self._found(self.lib.endpoints_ground, link)

    def satellite(self, link: int) -> bytes | None:
        return self._found(self.lib.endpoints_satellite, link)


SATELLITES = {(ip, 26_000 + at): at << 12 | 3 for at, ip in enumerate(["127.0.0.1", "::1", "fd00::1", "10.0.0.1"] * 20)}


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    made = Endpoints(SATELLITES, os.urandom(16))
    yield made
    made.lib.endpoints_free(made.it)


def test_satellites_are_found_both_ways(endpoints: Endpoints) -> None:
    for host, link in SATELLITES.items():
        assert endpoints.link(host) == link and endpoints.satellite(link) == packed(host)
    assert endpoints.satellite(1) is None


def test_hosts_that_differ_in_anything_are_others(endpoints: Endpoints) -> None:
    hosts = [
        ("127.0.0.1", 9),
        ("127.0.0.1", 10),
        ("127.0.0.2", 9),
        ("::7f00:1", 9),
        ("::ffff:127.0.0.1", 9),
        ("::1", 9),
        ("::1", 10),
        ("1::", 9),
        ("fe80::1%1", 9),
        ("fe80::1%2", 9),
        ("0.0.0.0", 0),
        ("::", 0),
    ]
    links = [endpoints.link(host) for host in hosts]
    assert len(set(links)) == len(hosts) and all(link & BEAM == BEAM for link in links)
    assert [endpoints.link(host) for host in hosts] == links
    assert [endpoints.ground(link) for link in links] == [packed(host) for host in hosts]


@pytest.mark.brief()
def test_of_more_hosts_than_places_the_oldest_are_forgotten(endpoints: Endpoints) -> None:
    dice = random.Random(3)
    hosts = [
        (str(ipaddress.ip_address(dice.randbytes(16 if number % 2 else 4))), dice.randrange(1 << 16))
        for number in range(PLACES + 3_000)
    ]
    links = [endpoints.link(host) for host in hosts]
    assert len(set(links)) == len(hosts)
    found = [endpoints.ground(link) for link in links]
    assert found == [None] * 3_000 + [packed(host) for host in hosts[3_000:]]
    assert [endpoints.link(host) for host in hosts[3_000:]] == links[3_000:]
    assert endpoints.link(hosts[0]) not in links and endpoints.ground(links[3_000]) is None
