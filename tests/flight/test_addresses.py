"""Hosts in C at several addresses of a computer, and clients in several processes; nothing leaves this computer."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.flight.daemon import ROOT
from tests.flight.test_daemon import PRESET, check, daemon, put, up, values

from skymemory.testbed import control
from skymemory.testbed.connect import open_constellation
from skymemory.testbed.flight import CHOICES, Choice, kinds_of
from skymemory.testbed.key_file import new_keys
from skymemory.testbed.plan import HostShare, Ports, local_hosts, make_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import inspect, start_on_free_ports, stop
from skymemory.transport.udp_socket import udp_socket

__all__ = ["daemon", "up"]


def hosts_at(ips: Sequence[str], ports: int | Ports) -> tuple[HostShare, ...]:
    shares = local_hosts(PRESET, len(ips), ports)
    return tuple(replace(share, ip=ip) for share, ip in zip(shares, ips, strict=True))


def store_and_move(folder: Path, satellite: Choice, ips: Sequence[str]) -> None:
    """A constellation with a host at each address keeps values over a move, and all of its satellites answer."""
    directory, kept = RunDirectory(folder / "run"), values(4, 200_000)
    keys_file = folder / "keys"
    new_keys(keys_file)
    try:
        plan = start_on_free_ports(
            directory,
            lambda ports: make_plan(
                hosts=hosts_at(ips, ports), delay_scale=0.0, auth="on", keys_file=str(keys_file), replicas=1
            ),
            95,
            kinds=kinds_of(satellite, local_hosts(PRESET, len(ips), 26_000)),
        ).plan
        assert {ip for ip, _ in plan.addresses().values()} == set(ips)
        with open_constellation(directory.path) as store:
            put(store, kept)
            check(store, kept)
            report = control.rotate(plan, 1, 1)
            assert report.complete and report.acknowledged == 95 and report.chunks_migrated > 0
            check(store, kept)
        assert all(control.ping_all(plan, 3.0).values())
        kinds = kinds_of(satellite, plan.hosts)
        assert [state.kind for state in inspect(directory)] == [kinds.get(host.name, "python") for host in plan.hosts]
    finally:
        stop(directory)


@pytest.mark.brief("c", "mixed IPv6")
@pytest.mark.parametrize(
    ("satellite", "ips"),
    [
        pytest.param("c", ["127.0.0.2", "127.1.2.3", "127.0.0.1"], id="c"),
        pytest.param("mixed", ["127.0.0.2", "127.1.2.3", "127.0.0.1"], id="mixed"),
        pytest.param("c", ["::1"] * 3, id="c IPv6"),
        pytest.param("mixed", ["::1"] * 3, id="mixed IPv6"),
        pytest.param("python", ["::1"] * 3, id="python IPv6"),
    ],
)
def test_other_addresses_of_the_loopback(
    daemon: Path, tmp_path: Path, satellite: Choice, ips: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with udp_socket(ips[0]) as probe:
            probe.bind((ips[0], 0))
    except OSError as error:
        pytest.skip(f"{ips[0]} cannot be bound here: {error}")
    monkeypatch.setenv("SKYMEMORY_FLIGHT", str(daemon))
    store_and_move(tmp_path, satellite, ips)


@pytest.mark.slow
@pytest.mark.parametrize("ips", [["10.77.0.1", "10.77.0.2"], ["fd77::1", "fd77::2"]], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("satellite", ["c", "mixed"])
def test_addresses_of_a_network_of_its_own(daemon: Path, tmp_path: Path, satellite: Choice, ips: list[str]) -> None:
    """In a network namespace, which has no way out: two addresses that are not of the loopback's range. That of IPv4
    has no IPv6.
    """
    inside = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    if subprocess.run([*inside, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespaces here")
    ipv6 = ":" in ips[0]
    if ipv6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    disabled = "" if ipv6 else "{ echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; } 2> /dev/null; "
    added = " && ".join(f"ip addr add {ip}/{128 if ipv6 else 32} dev lo" for ip in ips)
    script = f'{disabled}ip link set lo up && {added} && exec "$@"'
    arguments = [
        sys.executable,
        "-m",
        "tests.flight.test_addresses",
        str(tmp_path),
        satellite,
        *ips,
    ]
    done = subprocess.run(
        [*inside, "sh", "-c", script, "sh", *arguments],
        env={**os.environ, "SKYMEMORY_FLIGHT": str(daemon)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("satellite", ["c", "mixed"])
def test_clients_in_two_folders(up: Callable[..., RunDirectory], tmp_path: Path, satellite: Choice) -> None:
    """What a process in one folder has stored, another reads in its own, at the same time as it stores."""
    directory = up(satellite)

    def run(at: str, *words: str) -> subprocess.Popen[str]:
        (tmp_path / at).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "skymemory", "kv", *words, "--store", f"constellation://{directory.path}"]
        return subprocess.Popen(command, cwd=tmp_path / at, stderr=subprocess.PIPE, text=True)

    def finish(*processes: subprocess.Popen[str]) -> None:
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said

    data = {at: random.Random(at).randbytes(1_500_000) for at in ("one", "other")}
    for at, its in data.items():
        (tmp_path / at).mkdir()
        (tmp_path / at / "file").write_bytes(its)
    finish(*[run(at, "put", "file", "--key", at) for at in data])
    finish(*[run(at, "get", other, "-o", "copy") for at, other in (("one", "other"), ("other", "one"))])
    assert (tmp_path / "one" / "copy").read_bytes() == data["other"]
    assert (tmp_path / "other" / "copy").read_bytes() == data["one"]
    # Two values under one key at once may leave chunks of both: a miss then, which says why, and never a mixture.
    finish(run("one", "put", "file", "--key", "both"), run("other", "put", "file", "--key", "both"))
    last = run("one", "get", "both", "-o", "last")
    _, said = last.communicate(timeout=120)
    if last.returncode == 0:
        assert (tmp_path / "one" / "last").read_bytes() in data.values()
    else:
        assert "other version" in said
    finish(run("one", "put", "file", "--key", "both"))
    finish(run("other", "get", "both", "-o", "last"))
    assert (tmp_path / "other" / "last").read_bytes() == data["one"]


if __name__ == "__main__":
    where, chosen, *addresses = sys.argv[1:]
    assert chosen in CHOICES
    store_and_move(Path(where), chosen, addresses)
