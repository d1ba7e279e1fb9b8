"""Where a client listens: on loopback, at the address of the route to the hosts, or at the given address."""

from __future__ import annotations

import dataclasses
import errno
import socket

import pytest

from skymemory.errors import ConstellationError, InvalidInput
from skymemory.protocol.wire import Op
from skymemory.testbed import run_directory
from skymemory.testbed.connect import bind_ip_of, client_of
from skymemory.testbed.plan import ConstellationPlan, local_hosts, make_plan
from skymemory.transport import udp_socket as sources
from skymemory.transport.udp_socket import ANY, ANY_IPV6, source_address, source_towards


def plan_of(*ips: str, base_port: int = 26_000) -> ConstellationPlan:
    hosts = local_hosts("testbed-19x5", 5, base_port)
    return make_plan(
        "testbed-19x5",
        hosts=[dataclasses.replace(host, ip=ip) for host, ip in zip(hosts, ips * 5, strict=False)],
    )


def own_address() -> str:
    """This computer's outward address; a test that needs one is skipped where there is none."""
    found = source_towards("192.0.2.1")
    if found is None or found.startswith("127."):
        pytest.skip("no network but loopback")
    return found


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYMEMORY_BIND", raising=False)


def routes(monkeypatch: pytest.MonkeyPatch, **by_ip: str | None) -> None:
    table = {ip.replace("_", "."): source for ip, source in by_ip.items()}
    monkeypatch.setattr(sources, "source_towards", lambda ip: table[f"ip.{ip}"])


def test_a_client_of_this_computer_listens_on_loopback_only() -> None:
    assert bind_ip_of(plan_of("127.0.0.1")) == "127.0.0.1" == source_towards("127.0.0.1")
    assert source_address(["127.0.0.1"]) == "127.0.0.1"


def test_a_client_of_this_computer_by_ipv6() -> None:
    assert bind_ip_of(plan_of("::1")) == "::1"
    if source_towards("::1") is None:
        pytest.skip("no IPv6 here")
    assert source_address(["::1"]) == "::1"


@pytest.mark.parametrize(
    ("sources_by_ip", "expected"),
    [
        ({"fd00::2": "fd00::1", "::1": "::1"}, "fd00::1"),
        ({"fd00::2": "fd00::1", "fd01::2": "fd01::1"}, ANY_IPV6),
        ({"fd00::2": None}, None),
    ],
)
def test_one_ipv6_address_that_reaches_all(
    monkeypatch: pytest.MonkeyPatch, sources_by_ip: dict[str, str | None], expected: str | None
) -> None:
    monkeypatch.setattr(sources, "source_towards", sources_by_ip.__getitem__)
    assert source_address(sources_by_ip) == expected
    if expected is None:
        with pytest.raises(ConstellationError, match=r"no route .* fd00::2.*SKYMEMORY_BIND"):
            bind_ip_of(plan_of(*sources_by_ip))
    else:
        assert bind_ip_of(plan_of(*sources_by_ip)) == expected


def test_a_source_that_only_its_link_knows_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOneLink(socket.socket):
        def connect(self, _: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return "fe80::1", 9

    monkeypatch.setattr(sources, "udp_socket", lambda _: OnOneLink(socket.AF_INET, socket.SOCK_DGRAM))
    assert source_towards("fd00::2") is None


def test_a_computer_without_ipv6_has_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(_: str) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(sources, "udp_socket", without)
    assert source_towards("fd00::2") is None
    with pytest.raises(ConstellationError, match="cannot listen at ::1: Address family not supported"):
        client_of(plan_of("::1"), "ideal", 0.0, 0.1)
    monkeypatch.setattr(run_directory, "udp_socket", without)
    with pytest.raises(ConstellationError, match="::1 of host-0 is not an address of this computer"):
        run_directory.check_ports(plan_of("::1"))


@pytest.mark.parametrize(
    ("routed", "expected"),
    [
        ({"ip_10_0_0_2": "10.0.0.1", "ip_10_0_0_3": "10.0.0.1"}, "10.0.0.1"),
        ({"ip_127_0_0_1": "127.0.0.1", "ip_10_0_0_3": "10.0.0.1"}, "10.0.0.1"),
        ({"ip_10_0_0_2": None, "ip_10_0_0_3": "10.0.0.1"}, "10.0.0.1"),
        ({"ip_10_0_0_2": "10.0.0.1", "ip_192_168_0_2": "192.168.0.1"}, ANY),
        ({"ip_10_0_0_2": None}, None),
    ],
)
def test_one_address_that_reaches_all(
    monkeypatch: pytest.MonkeyPatch, routed: dict[str, str | None], expected: str | None
) -> None:
    routes(monkeypatch, **routed)
    ips = [ip.removeprefix("ip_").replace("_", ".") for ip in routed]
    assert source_address(ips) == expected
    if expected is None:
        with pytest.raises(ConstellationError, match=r"no route .* 10\.0\.0\.2.*SKYMEMORY_BIND"):
            bind_ip_of(plan_of(*ips))
    else:
        assert bind_ip_of(plan_of(*ips)) == expected


def test_the_setting_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYMEMORY_BIND", "10.1.2.3")
    assert bind_ip_of(plan_of("127.0.0.1")) == "10.1.2.3"
    monkeypatch.setenv("SKYMEMORY_BIND", "everywhere")
    with pytest.raises(InvalidInput, match=r"SKYMEMORY_BIND.*IPv4"):
        bind_ip_of(plan_of("127.0.0.1"))
    monkeypatch.setenv("SKYMEMORY_BIND", "FD00::5")
    assert bind_ip_of(plan_of("::1")) == "fd00::5"
    with pytest.raises(InvalidInput, match=r"SKYMEMORY_BIND.*expected an IPv4 address, as the plan's hosts have"):
        bind_ip_of(plan_of("127.0.0.1"))


def test_a_client_of_other_computers_is_not_to_be_reached_by_other_ways() -> None:
    """By sockets: it listens at the outward address, so what is sent to loopback does not come to it."""
    here = own_address()
    plan = plan_of("127.0.0.1", here)
    centre_ip, centre_port = plan.addresses()[plan.centre]
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind((centre_ip, 0))
    plan = plan_of("127.0.0.1", here, base_port=silent.getsockname()[1] - (centre_port - 26_000))
    client = client_of(plan, "los", 0.0, 0.1)
    try:
        assert client.address[0] == here
        number = client.machine.ask(Op.PING, b"", plan.centre, client.now_s())
        assert not client.run([number])[number].ok
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", client.address[1]))
            sock.send(b"anything")
            with pytest.raises(ConnectionRefusedError):
                sock.recv(1)
    finally:
        client.close()
        silent.close()
