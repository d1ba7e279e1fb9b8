"""``skymemory constellation``: operate a constellation of processes; ``skymemory satellite``: run a host."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import (
    add_json,
    add_run_dir,
    add_satellite_kind,
    add_setting,
    add_settings_file,
    argument,
    duration,
    read_settings,
)
from skymemory.errors import InvalidInput, SkyMemoryError
from skymemory.files import write_private
from skymemory.text import write_line
from skymemory.units import format_duration, format_size, parse_delay, parse_whole

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.constellation.torus import SatelliteId
    from skymemory.testbed.plan import ConstellationPlan, Ports
    from skymemory.testbed.run_directory import RunDirectory
    from skymemory.testbed.settings import SkySettings
    from skymemory.testbed.supervisor import SignalGate, Started


ACCESS_CHOICES = ("ideal", "gateway", "onboard", "hybrid", "los")
"""Copy of ``protocol.client.gateway.ACCESS_MODES``, without its import, and its alias ``los``."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "constellation",
        help="start, watch, change and stop a constellation of processes",
        description="Run a constellation as processes, one for each group of orbital planes, and operate it.",
    )
    verbs = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    up = verbs.add_parser("up", help="start all satellites as processes of this computer")
    _add_plan_options(up)
    add = up.add_argument
    add("--hosts", type=int, metavar="N", help="host processes (default: 5)")
    add(
        "--base-port",
        type=argument(_base_port),
        default=26_000,
        metavar="PORT",
        help="first UDP port, one per satellite from here; auto: find free ones (default: 26000)",
    )
    add("--foreground", action="store_true", help="stay in the foreground; Ctrl-C stops the constellation")
    add_satellite_kind(up)
    add_run_dir(up)

    status = verbs.add_parser("status", help="show which hosts run, which satellites answer and what they hold")
    status.add_argument(
        "--plan", type=Path, metavar="FILE", help="ask the satellites of this plan, not of the run directory's"
    )
    status.add_argument(
        "--patience", type=duration, default=1.0, metavar="TIME", help="timeout per satellite (default: 1s)"
    )
    add_run_dir(status)
    add_json(status)

    down = verbs.add_parser("down", help="stop the constellation and remove its files")
    add_run_dir(down)

    rotate = verbs.add_parser(
        "rotate", help="move the overhead satellite by hand; chunks migrate as they would with time"
    )
    add = rotate.add_argument
    add("--slots", type=int, metavar="N", help="slot moves (default: 1, or 0 with --planes)")
    add("--planes", type=int, default=0, metavar="N", help="plane moves (default: 0)")
    add("--plan", type=Path, metavar="FILE", help="rotate the constellation of this plan, not of the run directory's")
    add_run_dir(rotate)
    add_json(rotate)

    plan = verbs.add_parser("plan", help="write a plan for several computers, of which each runs its part")
    _add_plan_options(plan)
    add = plan.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="where to write the plan")
    add(
        "--host",
        action="append",
        required=True,
        metavar="IP:PORT",
        help="address and first UDP port of a computer; repeat for each, in the order of the planes",
    )
    add("--insecure", action="store_true", help="accept commands from other computers without keys")

    attach = verbs.add_parser("attach", help="use a constellation that runs on other computers, by its plan")
    attach.add_argument("plan", type=Path, metavar="FILE", help="the plan")
    add_run_dir(attach)

    _add_failures(verbs)
    _add_satellite(subparsers)


def _add_satellite(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "satellite",
        help="run the satellites of one host of a plan",
        description="Run the satellites of one host of a plan, until Ctrl-C. `skymemory constellation up` starts "
        "one such process per host on this computer; for several computers write one plan with "
        "`skymemory constellation plan`, copy it to each, and run this there.",
    )
    add = parser.add_argument
    add("--plan", type=Path, required=True, metavar="FILE", help="the plan that all hosts share")
    add("--host", required=True, metavar="HOST", help="name or number (from 0) of a host of the plan")
    add("--listen", metavar="IP", help="address to bind (default: the plan's; behind NAT: 0.0.0.0 or ::)")
    add("--insecure", action="store_true", help="listen on a non-loopback address although the plan has no MACs")
    add_run_dir(parser)
    add("--supervisor-fd", type=int, help=argparse.SUPPRESS)
    add(
        "--satellite",
        choices=("python", "c"),
        default="python",
        help="run satellites in Python, or those in C that `make flight` builds (default: python)",
    )
    add(
        "--write-config",
        type=Path,
        metavar="FILE",
        help="only write the configuration of the daemon in C, to run `skymemory-flight satellite --config FILE` "
        "where there is no Python",
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add_settings_file(parser, "settings in TOML; options come before its keys")
    setting = add_setting(parser)
    setting("--preset", "preset", metavar="NAME", help="geometry of the constellation (default: testbed-19x5)")
    setting(
        "--delay",
        "delay",
        type=argument(parse_delay),
        metavar="real|off|xK",
        help="hold each packet as long as light takes over the link, not at all, or K times as long (default: real)",
    )
    setting(
        "--access",
        "access",
        choices=ACCESS_CHOICES,
        help="how the host reaches satellites: all through the nearest in sight (gateway), those in sight directly and "
        "the rest through it (hybrid, default of presets with real orbits), as a satellite itself (onboard), or all "
        "directly, in sight or not, as in the paper (ideal, default of the paper's; once called los)",
    )
    setting("--replicas", "replicas", type=int, metavar="K", help="copies of every chunk (default: 1)")
    setting(
        "--time-scale",
        "time_scale",
        type=float,
        metavar="X",
        help="speed of the satellites' clock: 0 stands still (default), 1 is real time, 60 is an hour per minute",
    )
    setting(
        "--auth",
        "auth",
        choices=("off", "on", "answers", "every"),
        help="MACs on commands alone (on), on commands with the payloads of writes and all answers to clients except "
        "data (answers, default, with new keys), on every packet (every), or none (off)",
    )


def _base_port(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InvalidInput(f"{text!r} is not a port: expected a number such as 26000, or auto")
    return parse_whole(text)


def _satellite(text: str) -> SatelliteId:
    from skymemory.constellation.torus import SatelliteId

    match = re.fullmatch(r"(\d{1,4}),(\d{1,4})", text)
    if match is None:
        raise InvalidInput(f"{text!r}: expected a satellite as PLANE,SLOT, such as 2,9")
    return SatelliteId(parse_whole(match[1]), parse_whole(match[2]))


def run(args: argparse.Namespace) -> int:
    if args.verb == "satellite":
        return _run_satellite(args)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "up": _up,
        "status": _status,
        "down": _down,
        "rotate": _rotate,
        "plan": _write_plan,
        "attach": _attach,
        "disable": _disable,
        "enable": _enable,
        "revive": _revive,
    }
    return actions[args.action](args)


def _directory(args: argparse.Namespace) -> RunDirectory:
    from skymemory.testbed.run_directory import RunDirectory

    return RunDirectory(args.run_dir)


def _processes(count: int) -> str:
    return "1 host process" if count == 1 else f"{count} host processes"


def _up(args: argparse.Namespace) -> int:
    from skymemory.testbed.supervisor import SignalGate, watch

    directory = _directory(args)
    if not args.foreground:
        with directory.locked():  # from the beginning: a concurrent `down` waits, and stops what was started
            _start(args, directory, None)
        write_line("next: skymemory constellation status | skymemory kv put FILE | skymemory constellation down")
        return 0
    with SignalGate() as gate:
        with directory.locked():
            started = _start(args, directory, gate)
        write_line("Ctrl-C stops it")
        return watch(directory, started, lambda words: print(words, file=sys.stderr, flush=True), gate)


def _start(args: argparse.Namespace, directory: RunDirectory, gate: SignalGate | None) -> Started:
    """Start the host processes, and print that they are up."""
    from skymemory.testbed.carrying import check_time_scale
    from skymemory.testbed.control import confirm_all_answer
    from skymemory.testbed.flight import kinds_for
    from skymemory.testbed.plan import DEFAULT_BASE_PORT, DEFAULT_HOSTS, local_hosts
    from skymemory.testbed.settings import read_sky_settings
    from skymemory.testbed.supervisor import start, start_on_free_ports

    settings = read_settings(args, read_sky_settings)
    preset = settings.preset()
    torus = preset.torus
    hosts = min(DEFAULT_HOSTS, torus.planes) if args.hosts is None else args.hosts

    def plan_at(ports: int | Ports) -> ConstellationPlan:
        return settings.plan(preset, local_hosts(preset, hosts, ports), *_auth_of(args, settings))

    # Before any process is started: this computer may be too slow for the moves of a clock this fast.
    check_time_scale(plan_at(args.base_port or DEFAULT_BASE_PORT))
    kinds = kinds_for(args.satellite, plan_at(args.base_port or DEFAULT_BASE_PORT))
    how: dict[str, Any] = {"foreground": args.foreground, "confirm": confirm_all_answer, "gate": gate, "kinds": kinds}
    if args.base_port is None:
        started = start_on_free_ports(directory, plan_at, torus.cells, **how)
    else:
        started = start(directory, plan_at(args.base_port), **how)
    plan = started.plan
    ports = [port for _, port in plan.addresses().values()]
    write_line(
        f"{plan.preset} is up: {torus.size} satellites in {_processes(hosts)} on ports {min(ports)} to "
        f"{max(ports)}, in {started.seconds:.2f} s; {_memory_words(plan, directory)}"
    )
    return started


def _memory_words(plan: ConstellationPlan, directory: RunDirectory) -> str:
    from skymemory.testbed.supervisor import inspect

    used_bytes = sum(host.memory_bytes or 0 for host in inspect(directory))
    now = f"{format_size(used_bytes)} of memory used now, " if used_bytes else ""
    return f"{now}values may take up to {format_size(plan.memory_bytes)}"


def _status(args: argparse.Namespace) -> int:
    from skymemory.cli._status import collect, print_status

    report = collect(_directory(args), args.plan, args.patience)
    print_status(report, as_json=args.json)
    return 0 if report.healthy else 1


def _down(args: argparse.Namespace) -> int:
    from skymemory.testbed.supervisor import stop

    directory = _directory(args)
    stopped, forced = stop(directory)
    if not stopped:
        write_line(f"no constellation runs in {directory.path}")
    else:
        write_line(f"stopped {_processes(stopped)}" + (f", {forced} of them killed" if forced else ""))
    return 0


def _rotate(args: argparse.Namespace) -> int:
    from skymemory.cli._status import print_rotation
    from skymemory.testbed.control import rotate
    from skymemory.testbed.plan_file import load_plan, one_at_a_time, save_plan

    directory = _directory(args)
    path = args.plan or directory.plan_path
    # The plan is read twice. The lock file lies next to it, and taking the lock would create a folder for a wrong
    # --run-dir. The plan read under the lock is used, because another rotate may have moved the constellation
    # meanwhile.
    load_plan(path) if args.plan else directory.running_plan()  # raises before a lock is created if there is no plan
    with one_at_a_time(path):
        plan = load_plan(path) if args.plan else directory.running_plan()
        slots = args.slots if args.slots is not None else int(args.planes == 0)
        report = rotate(plan, slots, args.planes)
        # The moves are written back only into the plan that was rotated. A client that starts later must compute the
        # same positions as the satellites, and a constellation that was stopped or replaced must not get these moves.
        if path.exists() and load_plan(path) == plan:  # neither stopped nor restarted meanwhile
            slot_moves, plane_moves = report.moves_after
            save_plan(replace(plan, pushed_slot_moves=slot_moves, pushed_plane_moves=plane_moves), path)
    print_rotation(report, as_json=args.json)
    return 0 if report.complete else 1


# Failing satellites, and their return.


def _add_failures(verbs: Subparsers) -> None:
    for verb, what in (
        ("disable", "switch satellites off; their chunks are lost"),
        ("enable", "switch satellites on again, empty"),
    ):
        parser = verbs.add_parser(verb, help=what)
        parser.add_argument(
            "satellites", nargs="*", type=argument(_satellite), metavar="PLANE,SLOT", help="plane and slot, from 0"
        )
        parser.add_argument(
            "--plane", action="append", type=int, default=[], metavar="N", help="a whole plane; may be repeated"
        )
        if verb == "enable":
            parser.add_argument("--all", action="store_true", help="every satellite")
        add_run_dir(parser)
    revive = verbs.add_parser(
        "revive", help="restart the host processes of this computer that are dead or have a wrong time, empty"
    )
    add_run_dir(revive)


def _check_some_are_named(args: argparse.Namespace) -> None:
    if not (args.satellites or args.plane):
        raise InvalidInput(
            "no satellite given: name some as PLANE,SLOT, or a plane with --plane; "
            f"see `skymemory constellation {args.action} --help`"
        )


def _chosen(args: argparse.Namespace, plan: ConstellationPlan) -> list[SatelliteId]:

    for plane in args.plane:
        if not 0 <= plane < plan.planes:
            raise InvalidInput(f"no plane {plane}: expected 0 to {plan.planes - 1}")
    return [
        *args.satellites,
        *(satellite for satellite in plan.torus.satellites() if satellite.plane in args.plane),
    ]


def _disable(args: argparse.Namespace) -> int:
    from skymemory.testbed import control

    _check_some_are_named(args)
    directory = _directory(args)
    dead = control.disable(directory, _chosen(args, directory.running_plan()))
    write_line(f"{_satellites(len(dead))} disabled")
    return 0


def _enable(args: argparse.Namespace) -> int:
    from skymemory.testbed import control

    if not args.all:
        _check_some_are_named(args)
    elif args.satellites or args.plane:
        raise InvalidInput("--all with named satellites: leave one of them out")
    directory = _directory(args)
    dead = control.enable(directory, None if args.all else _chosen(args, directory.running_plan()))
    write_line(f"{_satellites(len(dead))} disabled" if dead else "no satellite is disabled")
    return 0


def _satellites(count: int) -> str:
    return "1 satellite is" if count == 1 else f"{count} satellites are"


def _revive(args: argparse.Namespace) -> int:
    from skymemory.testbed.control import host_clocks_s, hosts_of_another_time
    from skymemory.testbed.supervisor import revive as start_again

    directory = _directory(args)
    plan = directory.read_plan()
    clocks_s = host_clocks_s(plan) if plan.auth != "off" and directory.living() else {}
    wrong = hosts_of_another_time(clocks_s)
    for host, ahead_s in wrong.items():
        side = "ahead of" if ahead_s > 0 else "behind"
        write_line(
            f"the clock of {host} is {format_duration(abs(ahead_s))} {side} the others', which refuse its commands"
        )
    hosts = start_again(directory, wrong=wrong)
    write_line(f"started again, empty: {', '.join(hosts)}" if hosts else "no host process is dead")
    return 0


# Plans for several computers.


def _write_plan(args: argparse.Namespace) -> int:
    from skymemory.testbed.plan import remote_hosts
    from skymemory.testbed.plan_file import save_plan
    from skymemory.testbed.settings import read_sky_settings

    addresses = []
    for text in args.host:
        host, colon, port = text.rpartition(":")
        ip = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not port.isdecimal() or (ip != host) != (":" in ip):
            raise InvalidInput(
                f"host {text!r}: expected an address and a port such as 10.0.0.1:26000 or [fd00::1]:26000"
            )
        addresses.append((ip, parse_whole(port)))
    settings = read_settings(args, read_sky_settings)
    preset = settings.preset()
    plan = settings.plan(preset, remote_hosts(preset, addresses), *_auth_of(args, settings))
    _check_plan(plan, args.insecure)
    save_plan(plan, args.out)
    _print_how_to_share(plan, args.out, args.insecure)
    return 0


def _check_plan(plan: ConstellationPlan, insecure: bool) -> None:
    """Refuse a plan that accepts other computers without keys; create its keys if there are none."""
    from skymemory.testbed.key_file import new_keys, read_keys
    from skymemory.testbed.plan import check_exposure

    # Exposure is checked for every host before keys are written, so that a refused plan leaves no file behind.
    for host in plan.hosts:
        check_exposure(plan, host, None, insecure)
    if plan.auth != "off":
        path = Path(plan.keys_file)
        if path.exists():
            read_keys(path)
        else:
            new_keys(path)


def _print_how_to_share(plan: ConstellationPlan, path: Path, insecure: bool) -> None:
    flag = " --insecure" if insecure and plan.auth == "off" else ""
    if plan.auth == "off":
        write_line(f"wrote {path}; copy it to each computer and run there:")
    else:
        write_line(f"wrote {path}, whose keys are in {plan.keys_file}: copy both into one folder of each computer,")
        write_line("the keys over a secure channel, and run there:")
    for number, host in enumerate(plan.hosts):
        print(f"  on {host.ip}: skymemory satellite --plan {path.name} --host {number}{flag}")
    if flag:
        write_line("packets are not authenticated: use a network that only your computers reach")


def _attach(args: argparse.Namespace) -> int:
    from skymemory.testbed.plan_file import load_plan
    from skymemory.testbed.supervisor import attach

    directory = _directory(args)
    plan = load_plan(args.plan)
    attach(directory, plan)
    write_line(f"attached to {plan.preset}: {_hosts_heard(plan)}; detach with `skymemory constellation down`")
    if fragments := _fragments(plan):
        print(fragments)
    return 0


def _fragments(plan: ConstellationPlan) -> str:
    """Return a warning if the network would fragment the packet of a chunk."""
    from skymemory.protocol.auth import MAC_BYTES
    from skymemory.protocol.client.transfer import CHUNK_OVERHEAD_BYTES
    from skymemory.transport.udp_socket import largest_whole_bytes

    needed_bytes = plan.chunk_bytes + CHUNK_OVERHEAD_BYTES + MAC_BYTES
    sizes = [size for host in plan.hosts if (size := largest_whole_bytes(host.ip)) is not None]
    if min(sizes, default=needed_bytes) >= needed_bytes:
        return ""
    return (
        f"a chunk takes a datagram of {needed_bytes} bytes, and the network carries {min(sizes)} whole: of several "
        "fragments one that is lost or late costs all; set its MTU higher, or make a plan with `chunk = 1280`"
    )


def _hosts_heard(plan: ConstellationPlan) -> str:
    """Return in words which hosts answer, and if their clocks are too far off."""
    from skymemory.protocol.auth import MAX_SKEW_S
    from skymemory.testbed.control import host_clocks_s

    try:
        clocks_s = host_clocks_s(plan)
    except SkyMemoryError as error:
        return f"no host was asked: {error}"
    silent = [f"{host.name} ({host.ip})" for host in plan.hosts if host.name not in clocks_s]
    words = f"{len(clocks_s)} of {len(plan.hosts)} hosts answer"
    if silent:
        words += f", not {', '.join(silent)}: start them, or see that this computer reaches them"
    off_s = max(clocks_s.values(), key=abs, default=0.0)
    if plan.auth != "off" and abs(off_s) > MAX_SKEW_S:
        words += (
            f"; their clock is {format_duration(abs(off_s))} {'ahead of' if off_s > 0 else 'behind'} this computer's, "
            "whose commands they refuse: correct the wrong one and attach again"
        )
    return words


def _run_satellite(args: argparse.Namespace) -> int:
    from skymemory.testbed.flight import share_text
    from skymemory.testbed.host_process import run_host
    from skymemory.testbed.plan_file import load_plan

    plan = load_plan(args.plan)
    listen = None if args.listen is None else plan.parse_own_ip(args.listen, "--listen")
    host = plan.host_named(args.host)
    if args.write_config is not None:
        write_private(args.write_config, share_text(plan, host, listen))
        return 0
    run_host(
        plan,
        host,
        listen=listen,
        say=print,
        directory=_directory(args) if args.run_dir else None,
        supervisor_fd=args.supervisor_fd,
        insecure=args.insecure,
        kind=args.satellite,
    )
    return 0


# From settings to a plan.


def _auth_of(args: argparse.Namespace, settings: SkySettings) -> tuple[str, str]:
    """Return ``auth`` and the key file; new keys go into the run directory, or next to a written plan."""
    from skymemory.testbed.key_file import read_keys
    from skymemory.testbed.plan import DEFAULT_AUTH

    # Order of precedence: `auth`, then `keys` (which imply MACs), then --insecure (which implies none).
    keys = settings.keys
    insecure = getattr(args, "insecure", False) and keys is None
    auth = settings.auth or ("off" if insecure else DEFAULT_AUTH)
    if auth == "off":
        if keys is not None:
            raise InvalidInput("`keys` with auth 'off': leave one of them out")
        return auth, ""
    if keys is not None:
        read_keys(keys)
        return auth, str(keys.absolute())
    # Next to the plan: both are copied to the other computers together.
    if args.action == "plan":
        keys_path: Path = args.out.absolute().with_suffix(".keys")
        if keys_path == args.out.absolute():
            raise InvalidInput(f"--out {args.out}: the plan's keys need this name; choose another for the plan")
        return auth, str(keys_path)
    return auth, str(_directory(args).keys_path)
