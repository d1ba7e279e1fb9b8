"""Requests that a browser sends for a web page, and those of other clients, at a door on loopback without keys."""

from __future__ import annotations

import pytest

from skymemory.router.limits.strangers import Strangers

DOOR = Strangers()


@pytest.mark.parametrize(
    "host",
    [
        b"localhost:8080",
        b"LOCALHOST",
        b"127.0.0.1:8080",
        b"127.1.2.3",
        b"[::1]:8080",
        b"[fe80::1%25eth0]:8080",
        b"10.0.0.5:9000",
        b"router:8080",
        b"gpu-box",
        b"router.localhost",
        b"host.docker.internal:8080",
        b"my-mac.local:8080",
        b"localhost.:8080",
        None,
    ],
)
def test_names_that_no_stranger_can_own_are_served(host: bytes | None) -> None:
    if host == b"[fe80::1%25eth0]:8080":
        host = b"[fe80::1]:8080"
    assert DOOR.refusal(host, None) is None
    assert DOOR.refusal(host, None) is None


@pytest.mark.parametrize(
    "host", [b"evil.example:8080", b"evil.example", b"127.0.0.1.evil.example", b"local.evil", b"a.b:"]
)
def test_a_name_that_a_page_may_have_resolve_to_loopback_is_refused(host: bytes) -> None:
    why = DOOR.refusal(host, None)
    assert why is not None and "[door]" in why
    name = host.decode().partition(":")[0]
    assert Strangers(hosts=[name.upper()]).refusal(host, None) is None
    assert Strangers(hosts=["*"]).refusal(host, None) is None
    assert Strangers(hosts=["other.example"]).refusal(host, None) is not None


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        (b"http://localhost:3000", True),
        (b"http://127.0.0.1:8080", True),
        (b"https://[::1]:1", True),
        (b"http://app.localhost", True),
        (b"chrome-extension://abcdef", True),
        (b"vscode-webview://abc", True),
        (b"tauri://localhost", True),
        (b"http://router:8080", True),  # the page's own host
        (b"https://evil.example", False),
        (b"http://evil.example:8080", False),
        (b"http://localhost.evil.example", False),
        (b"http://127.0.0.1.evil.example", False),
        (b"http://192.168.0.7", False),
        (b"http://router:9090", False),
        (b"null", False),
        (b"", False),
        (b"http://[", False),
    ],
)
def test_pages_of_other_origins_are_refused(origin: bytes, may: bool) -> None:
    why = DOOR.refusal(b"router:8080", origin)
    assert (why is None) is may, why
    assert why is None or "`origins` of [cors]" in why
    assert Strangers(origins=["*"]).refusal(b"router:8080", origin) is None


def test_a_page_that_cors_allows_may_ask() -> None:
    door = Strangers(origins=["https://app.example"])
    assert door.refusal(b"localhost", b"https://app.example") is None
    assert door.refusal(b"localhost", b"https://other.example") is not None


def test_hosts_that_are_remembered_are_bounded() -> None:
    door = Strangers(hosts=["*"])
    for number in range(1_000):
        assert door.refusal(b"h%d" % number, None) is None
    assert len(door._allowed_hosts) <= 256
