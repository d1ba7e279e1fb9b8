"""Plans: what is accepted, what is refused and in which words, and that the file says the same as the
object.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymemory.constellation.ground_track import Waypoint
from skymemory.constellation.presets import PRESETS, preset_named
from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost, anchor
from skymemory.errors import InvalidInput, UnknownPreset
from skymemory.placement.layout import Strategy
from skymemory.placement.locate import Placement
from skymemory.protocol.client.gateway import ACCESS_MODES
from skymemory.protocol.clock import STRATEGY_CODES
from skymemory.testbed import plan_file
from skymemory.testbed.connect import sky_of
from skymemory.testbed.plan import (
    ConstellationPlan,
    Faults,
    Ground,
    HostShare,
    Ports,
    local_hosts,
    make_plan,
    remote_hosts,
)
from skymemory.testbed.plan_file import CLOCK_NAME, from_json, load_plan, save_plan, to_json, write_clock
from skymemory.units import parse_delay


def test_the_default_is_the_papers_testbed() -> None:
    plan = make_plan()
    assert (plan.planes, plan.slots_per_plane, plan.servers, plan.strategy) == (5, 19, 10, "rotation_hop")
    assert [host.planes for host in plan.hosts] == [(0,), (1,), (2,), (3,), (4,)]
    assert plan.centre == SatelliteId(2, 9)
    assert plan.memory_bytes == 95 * 64 * 2**20
    assert all(host.is_loopback for host in plan.hosts)


@given(preset=st.sampled_from(sorted(PRESETS)), hosts=st.integers(1, 12))
def test_every_satellite_has_one_address_of_its_own(preset: str, hosts: int) -> None:
    torus = PRESETS[preset].torus
    shares = local_hosts(preset, min(hosts, torus.planes), 26_000)
    plan = make_plan(preset, hosts=shares)
    addresses = plan.addresses()
    assert set(addresses) == set(torus.satellites())
    assert len(set(addresses.values())) == torus.size
    sizes = [len(share.planes) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    together = {satellite: address for host in plan.hosts for satellite, address in plan.addresses_of(host)}
    assert together == addresses


shares_of_one = st.floats(0, 1, allow_nan=False)


@st.composite
def plans(draw: st.DrawFn) -> ConstellationPlan:
    preset = draw(st.sampled_from(sorted(PRESETS)))
    torus = PRESETS[preset].torus
    hosts = draw(st.integers(1, min(6, torus.planes)))
    plan = make_plan(
        preset,
        hosts=local_hosts(preset, hosts, draw(free_ports())),
        servers=draw(st.integers(1, torus.size)),
        strategy=draw(st.sampled_from(["rotation", "hop", "rotation_hop", "cost", "baseline"])),
        access="ideal",  # others refuse some places
        chunk_bytes=draw(st.integers(64, 65_000)),
        delay_scale=draw(st.floats(0, 1000)),
        memory_per_satellite_bytes=draw(st.integers(65_536, 2**40)),
        epoch_s=draw(st.floats(0, 1e10)),
        time_scale=draw(st.floats(0, 1e6)),
        faults=Faults(*(draw(shares_of_one) for _ in range(4)), seed=draw(st.integers(0, 2**63 - 1))),
        ground=draw(grounds()),
    )
    return dataclasses.replace(plan, access=draw(st.sampled_from(ACCESS_MODES)))


@st.composite
def free_ports(draw: st.DrawFn) -> Ports:
    edges = sorted(draw(st.lists(st.integers(2, 20_000), max_size=8, unique=True)))
    base_port = draw(st.integers(1, 20_000))
    gaps = zip(edges[::2], edges[1::2], strict=False)
    return Ports(base_port, tuple((base_port + first, base_port + last) for first, last in gaps))


@given(ports=free_ports(), count=st.integers(1, 3000))
def test_ports_go_round_the_gaps(ports: Ports, count: int) -> None:
    taken = {port for first, last in ports.skipped for port in range(first, last + 1)}
    free = (port for port in itertools.count(ports.base_port) if port not in taken)
    assert ports.first(count) == list(itertools.islice(free, count))


@st.composite
def grounds(draw: st.DrawFn) -> Ground:
    latitude, longitude = draw(st.floats(-80, 80)), draw(st.floats(-180, 180))
    way = [Waypoint(100.0 * point, latitude / 2, longitude) for point in range(draw(st.integers(0, 3)))]
    gateway = draw(st.sampled_from(["nearest", "climbing"]))
    return Ground(latitude, longitude, draw(st.floats(0, 89)), gateway, tuple(way))


_HOST = {"name": "a", "ip": "127.0.0.1", "base_port": 1, "planes": [0, 1, 2, 3, 4]}


def test_a_plan_without_gaps_is_what_earlier_versions_read() -> None:
    assert "skipped_ports" not in to_json(make_plan())


@given(plan=plans())
def test_the_file_says_what_the_object_says(plan: ConstellationPlan) -> None:
    assert from_json(to_json(plan)) == plan


def test_a_plan_written_before_there_was_a_ground_is_read() -> None:
    for preset in sorted(PRESETS):
        old = json.loads(to_json(make_plan(preset)))
        del old["ground"]
        assert from_json(json.dumps(old)) == make_plan(preset, ground=Ground())


def test_every_release_reads_the_plan_of_an_ideal_access_by_its_old_name() -> None:
    plan = make_plan("starlink-a", access="ideal")
    old = json.loads(to_json(plan))
    assert old["access"] == "los" and make_plan("starlink-a", access="los") == plan
    assert from_json(json.dumps({**old, "access": "ideal"})) == plan
    del old["access"]  # of the first release
    assert from_json(json.dumps(old)) == plan


def test_real_presets_fly_by_default_and_the_papers_stay_ideal() -> None:
    for name, preset in PRESETS.items():
        plan = make_plan(name)
        flies = preset.fixed_centre is None and name != "paper-15x15"
        assert (plan.access, plan.ground.gateway) == (("hybrid", "climbing") if flies else ("ideal", "nearest"))
        assert preset_named(name, 1).access == "ideal"


def test_the_centre_is_the_anchor_of_the_plans_host() -> None:
    plan = make_plan("kuiper-a", ground=Ground(-33.9, 18.4))
    preset = PRESETS["kuiper-a"]
    assert plan.centre == anchor(preset.shell, GroundHost(-33.9, 18.4), preset.epoch_unix_s, 0.0).satellite
    elsewhere = json.loads(to_json(plan)) | {"centre": {"plane": 0, "slot": 0}}
    with pytest.raises(InvalidInput, match=r"centre \(0, 0\): expected .* overhead"):
        from_json(json.dumps(elsewhere))
    assert make_plan(ground=Ground(-33.9, 18.4)).centre == make_plan().centre, "the testbed's centre is fixed"


def test_saving_replaces_whole_files_and_loading_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "constellation.json"
    save_plan(make_plan(), path)
    save_plan(make_plan(servers=9), path)
    assert load_plan(path).servers == 9
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("{", "utf-8")
    with pytest.raises(InvalidInput, match=r"constellation\.json: not JSON"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="it is UTF-16, expected UTF-8"):
        load_plan(path)
    with pytest.raises(InvalidInput, match="cannot read"):
        load_plan(tmp_path / "none.json")
    with pytest.raises(InvalidInput, match="cannot write"):
        save_plan(make_plan(), tmp_path / "none" / "plan.json")


def _changed(**changes: object) -> str:
    return json.dumps({**json.loads(to_json(make_plan())), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ground": {"mask": 3}}, "ground: unknown key 'mask'; did you mean 'mask_deg'"),
        ({"ground": {"mask_deg": 90}}, "elevation mask 90: expected 0 to less than 90"),
        ({"ground": {"gateway": "lowest"}}, "gateway 'lowest': expected one of nearest, climbing"),
        ({"ground": {"latitude_deg": 91}}, "latitude 91"),
        ({"ground": {"waypoints": [[0, 1]]}}, "waypoint [0, 1]: expected [seconds, latitude, longitude]"),
        ({"ground": {"waypoints": 3}}, "waypoints: expected a list"),
        ({"ground": {"waypoints": [[0, 0, 0], [1, 9, 0]]}}, "m/s from waypoint 1 to 2"),
        ({"version": 2}, "version 2: this program reads version 1"),
        ({"serverz": 3}, "unknown key 'serverz'; did you mean 'servers'"),
        ({"colour": "red"}, "unknown key 'colour'; expected one of preset"),
        ({"servers": "ten"}, "servers is 'ten': expected int"),
        ({"servers": True}, "servers is True"),
        ({"servers": 96}, "96"),
        ({"servers": 0}, "0"),
        ({"fan_out": "some"}, "fan_out 'some': expected size or fixed"),
        ({"delay_scale": -1}, "delay scale -1"),
        ({"delay_scale": float("nan")}, "delay scale nan"),
        ({"epoch_s": float("inf")}, "epoch inf"),
        ({"time_scale": -2}, "time scale -2"),
        ({"access": "radio"}, "access 'radio'; expected one of ideal, gateway, onboard, hybrid"),
        ({"planes": 6}, "has 5 planes of 19 slots, the plan says 6 of 19"),
        ({"chunk_bytes": 70_000}, "chunks of 70000 bytes"),
        ({"memory_per_satellite_bytes": 10}, "hold no chunk"),
        ({"centre": {"plane": 5, "slot": 0}}, "not on the torus"),
        ({"centre": [1, 2]}, "expected an object with plane and slot"),
        ({"centre": {"plane": 1.5, "slot": 0}}, "whole numbers"),
        ({"hosts": {}}, "expected a list of hosts"),
        ({"hosts": []}, "no hosts"),
        ({"hosts": [{"name": "a", "ip": "127.0.0.1", "port": 1, "planes": [0]}]}, "unknown key 'port'; did you mean"),
        ({"hosts": [{"name": "a", "ip": "127.0.0.1", "base_port": 1}]}, "missing planes"),
        ({"hosts": [{**_HOST, "skipped_ports": 5}]}, "hosts[0].skipped_ports: expected a list"),
        ({"hosts": [{**_HOST, "skipped_ports": [5]}]}, "expected a list of whole numbers"),
        ({"hosts": [{**_HOST, "skipped_ports": [[5, 4]]}]}, "ascending order"),
        ({"hosts": [{**_HOST, "skipped_ports": [[1, 4]]}]}, "beyond 1"),
        ({"hosts": [{**_HOST, "skipped_ports": [[4]]}]}, "first and last of each gap"),
        ({"hosts": [{**_HOST, "skipped_ports": [[4, 9], [9, 10]]}]}, "ascending order"),
        ({"hosts": [{"name": "a", "ip": "127.0.0.1", "base_port": 1, "planes": "0"}]}, "list of whole numbers"),
        ({"hosts": [{**_HOST, "ip": "localhost"}]}, "expected an IPv4 or IPv6 address such as 127.0.0.1 or fd00::1"),
        ({"hosts": [{**_HOST, "ip": "[::1]"}]}, "expected an IPv4 or IPv6 address"),
        ({"hosts": [{**_HOST, "ip": "1::2::3"}]}, "expected an IPv4 or IPv6 address"),
        ({"hosts": [{**_HOST, "ip": "010.0.0.1"}]}, "expected an IPv4 or IPv6 address"),
        ({"hosts": [{**_HOST, "ip": "fe80::1%eth0"}]}, "expected an address without a zone such as fd00::1"),
        ({"hosts": [{**_HOST, "ip": "fe80::1"}]}, "belongs to one link"),
        ({"hosts": [{**_HOST, "ip": "fd00::1%1"}]}, "expected an address without a zone"),
        ({"hosts": [{**_HOST, "ip": "::ffff:10.0.0.1"}]}, "is an IPv4 address: expected it as 10.0.0.1"),
        ({"hosts": [{"name": "../a", "ip": "127.0.0.1", "base_port": 1, "planes": [0]}]}, "host name '../a'"),
        ({"hosts": ["a"]}, "hosts[0]: expected an object"),
        ({"faults": {"los": 0.1}}, "faults: unknown key 'los'; did you mean 'loss'"),
        ({"faults": {"loss": 2}}, "fault loss 2"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        from_json(_changed(**changes), "p.json")
    assert words in str(raised.value)
    assert str(raised.value).startswith("p.json: ")


@given(
    text=st.text(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["version", "preset", "hosts", "servers", "centre", "faults", "planes"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ).map(json.dumps)
)
def test_garbage_is_invalid_input_and_nothing_else(text: str) -> None:
    with pytest.raises(InvalidInput):
        from_json(text)


def test_a_missing_key_and_an_unknown_preset_are_named() -> None:
    found = json.loads(to_json(make_plan()))
    del found["hosts"]
    with pytest.raises(InvalidInput, match="missing hosts"):
        from_json(json.dumps(found))
    with pytest.raises(UnknownPreset, match=r"did you mean .starlink-"):
        make_plan("starlink")


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ((HostShare("a", "127.0.0.1", 26_000, (0, 1, 2, 3)),), "expected 0 to 4, each once"),
        ((HostShare("a", "127.0.0.1", 26_000, (0, 1, 2, 3, 4, 4)),), "expected 0 to 4, each once"),
        (
            (HostShare("a", "127.0.0.1", 26_000, (0, 1)), HostShare("b", "127.0.0.1", 26_037, (2, 3, 4))),
            "b and a share ports on 127.0.0.1",
        ),
        ((HostShare("a", "10.0.0.1", 26_000, (0, 1)), HostShare("a", "10.0.0.2", 1, (2, 3, 4))), "share a name"),
        ((HostShare("a", "127.0.0.1", 65_500, (0, 1, 2, 3, 4)),), "the last port is 65535"),
        (
            (HostShare("a", "FD00::01", 26_000, (0, 1)), HostShare("b", "fd00::1", 26_037, (2, 3, 4))),
            "b and a share ports on fd00::1",
        ),
        (
            (HostShare("a", "10.0.0.1", 26_000, (0, 1)), HostShare("b", "fd00::1", 26_000, (2, 3, 4))),
            "a is at 10.0.0.1, b at fd00::1: IPv4 and IPv6 do not reach each other",
        ),
    ],
)
def test_hosts_that_cannot_be(hosts: tuple[HostShare, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_plan(hosts=hosts)


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("FD00:0:0::0001", "fd00::1"),
        ("::1", "::1"),
        ("2001:db8:0:1:0:0:0:1", "2001:db8:0:1::1"),
        ("2001:db8:0:1:1:1:1:1", "2001:db8:0:1:1:1:1:1"),
        ("::102:304", "::1.2.3.4"),  # as inet_ntop of the C libraries has it
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_an_address_is_spelled_as_that_of_a_packets_sender(written: str, spelled: str) -> None:
    plan = make_plan(hosts=(HostShare("a", written, 26_000, (0, 1, 2, 3, 4)),))
    assert plan.addresses()[SatelliteId(0, 0)] == (spelled, 26_000)
    assert from_json(to_json(plan)) == plan
    assert plan.is_ipv6 == (":" in written) and plan.hosts[0].is_loopback == (written == "::1")


def test_the_same_ports_on_different_computers_are_fine() -> None:
    plan = make_plan(hosts=remote_hosts("testbed-19x5", [(f"10.0.0.{n}", 26_000) for n in range(1, 6)]))
    assert plan.addresses()[SatelliteId(4, 18)] == ("10.0.0.5", 26_018)
    assert plan.host_named("3") is plan.host_named("host-3") is plan.hosts[3]
    with pytest.raises(InvalidInput, match="no host '5'"):
        plan.host_named("5")
    with pytest.raises(InvalidInput, match="6 hosts for 5 planes"):
        local_hosts("testbed-19x5", 6, 26_000)


@pytest.mark.parametrize(("text", "scale"), [("real", 1), ("off", 0), ("x2", 2), ("×0.5", 0.5), ("3x", 3), ("X10", 10)])
def test_delays_as_people_write_them(text: str, scale: float) -> None:
    assert parse_delay(text) == scale


@pytest.mark.parametrize("text", ["", "fast", "x", "x-1", "2", "x1e9", "x..", "1.2.3x"])
def test_delays_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected real, off, or a factor"):
        parse_delay(text)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_plan().servers = 3  # type: ignore[misc]


def test_a_plan_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(InvalidInput, match="cannot write the plan"):
        save_plan(make_plan(), tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("strategy", ["rotation_hop", "cost"])
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_runs_is_laid_out_as_the_map_says(preset: str, strategy: Strategy) -> None:
    plan = make_plan(preset, strategy=strategy)
    placement = Placement.for_preset(preset_named(preset), strategy)
    assert sky_of(plan).servers_at(STRATEGY_CODES[strategy], plan.servers, (0, 0), (3, 1)) == placement.locate_all(
        (0, 0), (3, 1)
    )


def test_values_have_the_servers_that_are_named_and_else_as_many_as_their_sizes_are_worth() -> None:
    assert make_plan().by_size
    for servers in (1, 10, 16):
        assert not make_plan(servers=servers).by_size
        assert not from_json(to_json(make_plan(servers=servers))).by_size
    assert from_json(to_json(make_plan())).by_size
    assert dataclasses.replace(make_plan(servers=16), fan_out="size").by_size
    # Earlier releases read every plan but one: all values on as many as the preset's default.
    fields = [json.loads(to_json(make_plan(servers=servers))) for servers in (None, 16, 10)]
    assert ["fan_out" in one for one in fields] == [False, False, True]


def test_a_recorded_clock_holds_until_the_computer_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "constellation.json"
    save_plan(make_plan(), path)
    assert load_plan(path).unix_at_boot_s is None and "unix_at_boot_s" not in path.read_text("utf-8")
    monkeypatch.setattr(plan_file, "boot_id", lambda: "this run")
    write_clock(tmp_path / CLOCK_NAME, 1_700_000_000.5)
    assert load_plan(path).unix_at_boot_s == 1_700_000_000.5 and load_plan(path) == make_plan()
    for boot in ("another run", ""):
        monkeypatch.setattr(plan_file, "boot_id", lambda boot=boot: boot)
        assert load_plan(path).unix_at_boot_s is None
    monkeypatch.setattr(plan_file, "boot_id", lambda: "this run")
    for damaged in ("", "[]", '{"boot": "this run", "unix_at_boot_s": NaN}', '{"boot": "this run"}'):
        (tmp_path / CLOCK_NAME).write_text(damaged, "utf-8")
        assert load_plan(path).unix_at_boot_s is None
    with pytest.raises(InvalidInput, match="unknown key 'unix_at_boot_s'"):
        from_json(to_json(make_plan())[:-3] + ', "unix_at_boot_s": 1.0}')
