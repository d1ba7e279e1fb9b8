"""``skymemory constellation`` and ``satellite`` as far as they go without processes: options, plans,
complaints.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from skymemory.cli._status import StatusReport, print_status
from skymemory.cli.main import main
from skymemory.constellation.ground_track import Waypoint
from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.messages import HOUSEKEEPING_FIELDS, OURS
from skymemory.testbed.connect import tolerated_skew_s
from skymemory.testbed.control import Rotation
from skymemory.testbed.plan import ConstellationPlan, Faults, Ground, make_plan
from skymemory.testbed.plan_file import load_plan
from skymemory.testbed.run_directory import RunDirectory
from skymemory.testbed.supervisor import HostState


@pytest.fixture(autouse=True)
def run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SKYMEMORY_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def _main(words: str) -> int:
    try:
        return main(words.split())
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("up --preset starlink-c", "unknown constellation preset 'starlink-c'"),
        ("up --hosts 6", "6 hosts for 5 planes"),
        ("up --hosts 0", "0 hosts for 5 planes"),
        ("up --access radio", "radio"),
        ("up --delay fast", "expected real, off, or a factor"),
        ("up --base-port nine", "expected a number such as 26000, or auto"),
        ("up --base-port 65450", "the last port is 65535"),
        ("up --time-scale nan", "expected a finite number"),
        ("up --frobnicate", "unrecognized arguments: --frobnicate"),
        ("up --time-sclae 1", "did you mean '--time-scale'?"),
        ("stauts", "there is no 'stauts'; did you mean 'status'?"),
        ("status --patience soon", "'soon' is not a duration"),
        ("plan --out p.json --host 10.0.0.1", "expected an address and a port"),
        ("plan --out p.json --host ten:1", "expected an IPv4 or IPv6 address"),
        ("plan --out p.json --host ::1:26000", "such as 10.0.0.1:26000 or [fd00::1]:26000"),
        ("plan --out p.json --host [10.0.0.1]:26000", "such as 10.0.0.1:26000 or [fd00::1]:26000"),
        ("plan --out p.json --host [fe80::1%eth0]:26000", "expected an address without a zone"),
        ("plan --out p.json --host 10.0.0.1:26000 --host [fd00::1]:26000", "IPv4 and IPv6 do not reach each other"),
        ("plan --out p.json --host 127.0.0.1:²", "expected an address and a port"),
        ("plan --out . --host 127.0.0.1:26000", "it is a folder"),
        ("plan --out p.keys --host 10.0.0.1:26000", "choose another for the plan"),
        ("up --base-port ²", "expected a number such as 26000, or auto"),
        ("up --hosts five", "'five': expected a whole number"),
        ("up --time-scale fast", "'fast': expected a number"),
        ("rotate --slots -", "'-': expected a whole number"),
        ("status --patience -1s", "expected one argument (one that begins with a dash is written after ="),
        ("disable", "see `skymemory constellation disable --help`"),
        ("enable --all --plane 1", "--all with named satellites"),
    ],
)
def test_bad_input_is_reported_with_what_was_expected(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    assert _main(f"constellation {words}") == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.startswith("skymemory: ") and said.err.count("\n") == 1
    assert not said.out and not run_dir.exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("servers = 96", "96"),
        ("server = 9", "server: unknown setting; did you mean 'servers'?"),
        ("strategy = 'spiral'", "spiral"),
        ("memory_per_satellite = '1KiB'", "hold no chunk"),
        ("memory_per_satellite = 'lots'", "memory_per_satellite: 'lots' is not a size"),
        ("chunk = '64KiB'", "a datagram carries"),
        ("chunk = " + 400 * "9", "a whole number of at most 64 bits"),
        ("delay = 'fast'", "delay: delay 'fast': expected real, off, or a factor"),
        ("replacement = 'lur'", "replacement 'lur': expected one of"),
        ("sweep = '5s'", "`sweep` has no effect with eviction 'lazy'"),
        ("skip_bad = true", "about the file of `tle`"),
        ("tle = 'x.tle'", "expected `shell` with it"),
        ("keys = 'k'\nauth = 'off'", "leave one of them out"),
        ("faults.loss = 2", "faults: loss: 2: expected a share from 0 to 1"),
        ("faults.loss = '101%'", "expected 0 to 1 or 0% to 100%"),
        ("faults.seed = -1", "fault seed -1"),
        ("ground.at = [40, -75]", "ground: at has no effect with preset 'testbed-19x5'"),
        ("preset = 'paper-15x15'\nground.gateway = 'climbing'", "gateway has no effect with preset 'paper-15x15'"),
        ("preset = 'starlink-a'\n[ground]\nat = [1, 1]\npath = 'way'", "leave one of them out"),
        ("ground.mask = 90", "elevation mask 90"),
        ("ground.at = 40", "expected latitude and longitude in degrees, such as"),
        ("preset = 'starlink-a'\nground.at = [91, 0]", "latitude 91"),
        ("preset = 'starlink-a'\nground.path = 'none.txt'", "cannot read none.txt"),
        ("preset = 'starlink-a'\nground.gateway = 'lowest'", "lowest"),
    ],
)
def test_settings_that_are_wrong_are_reported_with_what_was_expected(
    text: str, complaint: str, capsys: pytest.CaptureFixture[str], run_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "sky.toml"
    file.write_text(text, "utf-8")
    assert _main(f"constellation up --settings {file}") == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.startswith("skymemory: ") and said.err.count("\n") == 1
    assert not said.out and not run_dir.exists()


@pytest.mark.parametrize("action", ["status", "rotate", "status --json"])
def test_no_constellation_running_says_how_to_start_one(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(f"constellation {action}") == 1
    assert "start one with `skymemory constellation up`" in capsys.readouterr().err


def test_down_with_nothing_up_is_fine(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    assert _main("constellation down") == 0
    assert "no constellation runs" in capsys.readouterr().out
    assert not run_dir.exists()


def test_the_plan_of_five_computers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "sky.json"
    hosts = " ".join(f"--host 10.0.0.{n}:26000" for n in range(1, 6))
    file = tmp_path / "sky.toml"
    faults = "faults = {loss = '1%', duplicate = '2%', reorder = 0.03, corrupt = 0, seed = 7}"
    file.write_text(f"delay = 'real'\nservers = 9\n{faults}", "utf-8")
    words = f"constellation plan --out {out} {hosts} --settings {file} --access gateway"
    assert _main(f"{words} --delay x2") == 0, "an option comes before the file's key"
    plan = load_plan(out)
    assert [host.ip for host in plan.hosts] == [f"10.0.0.{n}" for n in range(1, 6)]
    assert (plan.delay_scale, plan.servers, plan.access) == (2.0, 9, "gateway")
    assert plan.faults == Faults(0.01, 0.02, 0.03, 0.0, 7)
    said = capsys.readouterr().out
    assert "on 10.0.0.5: skymemory satellite --plan sky.json --host 4" in said
    assert (plan.auth, plan.keys_file) == ("answers", str(tmp_path / "sky.keys")) and plan.keys_file in said
    assert (tmp_path / "sky.keys").stat().st_mode & 0o777 == 0o600


def test_a_plan_of_computers_with_ipv6(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "sky.json"
    assert _main(f"constellation plan --out {out} --host [FD00::1]:26000 --host [fd00::2]:26000") == 0
    assert [(host.ip, host.base_port) for host in load_plan(out).hosts] == [("fd00::1", 26_000), ("fd00::2", 26_000)]
    assert "on fd00::2: skymemory satellite --plan sky.json --host 1" in capsys.readouterr().out


def test_a_plan_for_other_computers_without_keys_must_be_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "sky.json"
    words = f"constellation plan --out {out} --host 10.0.0.1:26000"
    assert _main(f"{words} --auth off") == 2 and not out.exists()
    assert "--insecure" in capsys.readouterr().err
    assert _main(f"{words} --insecure") == 0 and load_plan(out).auth == "off"
    said = capsys.readouterr().out
    assert "--host 0 --insecure" in said and "not authenticated" in said
    assert _main(f"satellite --plan {out} --host 0") == 2
    assert "10.0.0.1" in capsys.readouterr().err
    assert _main(f"constellation plan --out {out} --host 127.0.0.1:1") == 0 and load_plan(out).auth == "answers"
    assert _main(f"constellation plan --out {out} --host 127.0.0.1:1 --auth off") == 0
    assert load_plan(out).auth == "off"
    assert _main(f"satellite --plan {out} --host 0 --listen 0.0.0.0") == 2
    assert "--insecure" in capsys.readouterr().err
    assert _main(f"constellation plan --out {out} --host [::1]:1 --auth off") == 0
    assert _main(f"satellite --plan {out} --host 0 --listen ::") == 2
    assert "--insecure" in capsys.readouterr().err


def test_plan_and_keys_may_be_copied_together(tmp_path: Path) -> None:
    out = tmp_path / "here" / "sky.json"
    out.parent.mkdir()
    assert _main(f"constellation plan --out {out} --host 10.0.0.1:26000") == 0
    out.parent.rename(tmp_path / "there")
    assert load_plan(tmp_path / "there" / "sky.json").keys_file == str(tmp_path / "there" / "sky.keys")


def test_attach_and_forget(capsys: pytest.CaptureFixture[str], tmp_path: Path, run_dir: Path) -> None:
    out = tmp_path / "sky.json"
    assert _main(f"constellation plan --out {out} --host 127.0.0.1:1") == 0
    assert _main(f"constellation attach {out}") == 0
    said = capsys.readouterr().out
    assert "0 of 1 hosts answer, not host-0 (127.0.0.1): start them" in said
    assert load_plan(run_dir / "constellation.json") == load_plan(out)
    assert _main("constellation down") == 0
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--plan {plan} --host 5", "no host '5' in the plan"),
        ("--plan {plan} --host 0 --listen nowhere", "'nowhere'"),
        ("--plan {plan} --host 0 --listen ::", "expected an IPv4 address, as the plan's hosts have"),
        ("--plan {none} --host 0", "cannot read the plan"),
        ("--plan {bad} --host 0", "did you mean 'servers'"),
        ("--host 0", "--plan"),
    ],
)
def test_a_satellite_that_cannot_start_says_why(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, bad = tmp_path / "p.json", tmp_path / "bad.json"
    assert _main(f"constellation plan --out {plan} --host 127.0.0.1:26000") == 0
    bad.write_text(json.dumps({**json.loads(plan.read_text("utf-8")), "server": 3}), "utf-8")
    assert _main("satellite " + words.format(plan=plan, bad=bad, none=tmp_path / "none.json")) == 2
    assert complaint in capsys.readouterr().err


def test_the_map_is_the_same_as_that_of_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("layout --servers 9") == 0
    by_alias = capsys.readouterr().out
    assert _main("layout --servers 9") == 0
    assert capsys.readouterr().out == by_alias


def test_a_plan_with_a_ship(tmp_path: Path, capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    way, out = tmp_path / "way.txt", tmp_path / "sky.json"
    way.write_text("0 40 -74\n86400 42 -60  # a day later\n", "utf-8")
    file = tmp_path / "sky.toml"
    file.write_text(f"[ground]\nmask = 15\ngateway = 'climbing'\npath = '{way}'", "utf-8")
    words = f"--preset starlink-a --access hybrid --settings {file}"
    assert _main(f"constellation plan --out {out} --host 10.0.0.1:2000 {words}") == 0
    plan = load_plan(out)
    way_points = (Waypoint(0, 40, -74), Waypoint(86400, 42, -60))
    assert plan.ground == Ground(mask_deg=15.0, gateway="climbing", waypoints=way_points)
    assert plan.access == "hybrid"


def test_status_names_clocks_that_are_too_far_apart(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("testbed-19x5", time_scale=100.0)
    fine: dict[str, int] = dict.fromkeys(HOUSEKEEPING_FIELDS, 0) | {"clock_off_us": 900_000}
    answers: dict[SatelliteId, dict[str, int] | None] = dict.fromkeys(plan.torus.satellites(), fine)
    hosts = [HostState(host.name, "elsewhere", None, None, "") for host in plan.hosts]
    assert tolerated_skew_s(plan) == pytest.approx(1.3, abs=0.01)
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "WARNING" not in capsys.readouterr().out
    for satellite, _ in plan.addresses_of(plan.hosts[1]):
        answers[satellite] = fine | {"clock_off_us": 2_500_000}
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "clocks of 19 satellites differ from this computer's by up to 2.5 s" in capsys.readouterr().out
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["clocks_beyond_bound"], report["clock_off_us"]) == (19, 2_500_000)


def test_two_rotates_at_once_both_count(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    """Each reports the total, computed from the one before: together they used to lose a move."""
    moved = [0]

    def rotate(plan: ConstellationPlan, slot_moves: int, plane_moves: int) -> Rotation:
        before = moved[0]
        time.sleep(0.05)
        moved[0] = before + slot_moves
        return Rotation((before, 0), (moved[0], 0), 95, 95, 0, True, 0.05)

    monkeypatch.setattr("skymemory.testbed.control.rotate", rotate)
    RunDirectory(run_dir).create()
    RunDirectory(run_dir).write_plan(make_plan())
    threads = [threading.Thread(target=_main, args=("constellation rotate --slots 1",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert moved == [4] and load_plan(RunDirectory(run_dir).plan_path).pushed_slot_moves == 4


def test_status_says_that_pools_were_full(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("testbed-19x5")
    ours = dict.fromkeys(HOUSEKEEPING_FIELDS, 0) | {"clock_off_us": 0} | OURS.figures()
    answers: dict[SatelliteId, dict[str, int] | None] = dict.fromkeys(plan.torus.satellites(), ours)
    hosts = [HostState(host.name, "elsewhere", None, None, "") for host in plan.hosts]
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "pools" not in capsys.readouterr().out
    answers |= {satellite: ours | {"pools_full": 2} for satellite, _ in plan.addresses_of(plan.hosts[1])}
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "pools of satellites were full 38 times" in capsys.readouterr().out
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=True)
    assert json.loads(capsys.readouterr().out)["totals"]["pools_full"] == 38


def test_status_says_how_many_satellites_are_of_an_older_release(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan("testbed-19x5")
    ours = dict.fromkeys(HOUSEKEEPING_FIELDS, 0) | {"clock_off_us": 0, "chunks_held": 2} | OURS.figures()
    older = {name: value for name, value in ours.items() if name not in OURS.figures()}
    answers: dict[SatelliteId, dict[str, int] | None] = dict.fromkeys(plan.torus.satellites(), ours)
    hosts = [HostState(host.name, "elsewhere", None, None, "") for host in plan.hosts]
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "older release" not in capsys.readouterr().out
    answers |= {satellite: older for satellite, _ in plan.addresses_of(plan.hosts[1])}
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=False)
    assert "19 satellites run an older release" in capsys.readouterr().out
    print_status(StatusReport(plan, hosts, answers, "here"), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["of_older_releases"] == 19 and report["totals"]["chunks_held"] == 190
    assert not {"operations", "protocol_versions", "codecs", "late_us"} & set(report["totals"])
