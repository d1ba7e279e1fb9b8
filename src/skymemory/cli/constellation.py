"""``skymemory constellation``: start, look at, move and stop the constellation of processes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli import _faults, layout
from skymemory.cli._ground import add_ground_options, ground_of
from skymemory.cli._options import add_json, add_run_dir, argument, duration, fraction, size
from skymemory.cli._protection import add_auth, auth_of, check_plan, say_how_to_share
from skymemory.errors import InvalidInput
from skymemory.protocol.replacement import DEFAULT_REPLACEMENT, REPLACEMENTS
from skymemory.units import format_size, parse_delay

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.testbed.plan import ConstellationPlan, HostShare, Ports
    from skymemory.testbed.run_directory import RunDirectory
    from skymemory.testbed.signals import SignalGate
    from skymemory.testbed.supervisor import Started


def _base_port(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InvalidInput(f"{text!r} is not a port: expected a number such as 26000, or auto")
    return int(text)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What a constellation is; left out, the preset's own defaults hold."""
    parser.add_argument("--preset", default="testbed-19x5", help="which constellation (default: %(default)s)")
    parser.add_argument(
        "--delay", type=argument(parse_delay), default=1.0, metavar="real|off|xK",
        help="hold packets as long as light takes over the geometry's links, not at all, or K times as long",
    )  # fmt: skip
    parser.add_argument(
        "--memory-per-satellite", type=size, default=64 * 2**20, metavar="SIZE", help="(default: 64MiB)"
    )
    parser.add_argument("--servers", type=int, help="satellites a value is spread over (default: the preset's, 10)")
    parser.add_argument("--replicas", type=int, default=1, metavar="K", help="copies of every chunk (default: 1)")
    parser.add_argument("--strategy", help="placement: rotation, hop, rotation_hop, cost or baseline")
    add_ground_options(parser)
    parser.add_argument("--chunk", type=size, default=6144, metavar="SIZE", help="chunk size (default: 6144)")
    parser.add_argument(
        "--time-scale", type=float, default=0.0, metavar="X",
        help="speed of the satellites' clock: 0 stands still (default), 1 is real, 60 an hour a minute",
    )  # fmt: skip
    memory = parser.add_argument_group("memory", "what a satellite does when its memory is full; see docs/eviction.md")
    memory.add_argument(
        "--eviction", default="lazy", metavar="POLICIES",
        help="who drops the rest of a block that lost a chunk: some of lazy, gossip or gossip-plane, periodic, "
        "migration, with commas between them, or none (default: %(default)s)",
    )  # fmt: skip
    memory.add_argument(
        "--replacement", default=DEFAULT_REPLACEMENT, choices=REPLACEMENTS,
        help="what goes first: used longest ago (lru), seldom (lfuda), or seldom of late (lrfu; default)",
    )  # fmt: skip
    memory.add_argument(
        "--sweep", type=duration, metavar="TIME",
        help="between sweeps of periodic, and between looks for copies that are lost (default: 30s)",
    )  # fmt: skip
    add_auth(parser)
    faults = parser.add_argument_group("faults", "injected by the satellites, as shares of packets such as 1%%")
    for name, what in (
        ("loss", "packets dropped"), ("duplicate", "packets doubled"),
        ("reorder", "packets held back"), ("corrupt", "packets with a changed bit"),
    ):  # fmt: skip
        faults.add_argument(f"--{name}", type=fraction, default=0.0, metavar="SHARE", help=what)
    faults.add_argument("--fault-seed", type=int, default=0, metavar="N", help="the same seed, the same faults")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("constellation", help="start, look at, move and stop the constellation of processes")
    verbs = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    up = verbs.add_parser("up", help="start all its satellites as processes on this computer")
    _add_plan_options(up)
    up.add_argument("--hosts", type=int, metavar="N", help="host processes (default: 5)")
    up.add_argument(
        "--base-port", type=argument(_base_port), default=26_000, metavar="PORT",
        help="first UDP port, one per satellite from here; auto looks for free ones (default: 26000)",
    )  # fmt: skip
    up.add_argument("--foreground", action="store_true", help="stay, and stop it all at Ctrl-C")
    add_run_dir(up)

    status = verbs.add_parser("status", help="which hosts run, which satellites answer, what they hold")
    status.add_argument("--plan", type=Path, metavar="FILE", help="ask the satellites of this plan instead")
    status.add_argument("--patience", type=duration, default=1.0, metavar="TIME", help="per satellite (default: 1s)")
    add_run_dir(status)
    add_json(status)

    down = verbs.add_parser("down", help="stop it and remove its files")
    add_run_dir(down)

    rotate = verbs.add_parser("rotate", help="advance the overhead point by hand, so that the satellites migrate")
    rotate.add_argument("--slots", type=int, default=1, metavar="N", help="slot moves (default: 1)")
    rotate.add_argument("--planes", type=int, default=0, metavar="N", help="plane moves (default: 0)")
    rotate.add_argument("--plan", type=Path, metavar="FILE", help="turn the constellation of this plan instead")
    add_run_dir(rotate)
    add_json(rotate)

    plan = verbs.add_parser("plan", help="write the file that several computers share, each running its part")
    _add_plan_options(plan)
    plan.add_argument("--out", type=Path, required=True, metavar="FILE")
    plan.add_argument(
        "--host", action="append", required=True, metavar="IP:PORT",
        help="a computer and its first UDP port; once per computer, in the order of the planes",
    )  # fmt: skip
    plan.add_argument("--insecure", action="store_true", help="let other computers command it without keys")

    attach = verbs.add_parser("attach", help="use the constellation of a plan that runs on other computers")
    attach.add_argument("plan", type=Path, metavar="FILE")
    add_run_dir(attach)

    _faults.add_parsers(verbs)
    layout.add_parser(verbs)


def _plan_of(args: argparse.Namespace, hosts: tuple[HostShare, ...]) -> ConstellationPlan:
    from skymemory.testbed.memory_policy import MemoryPolicy
    from skymemory.testbed.plan import Faults, make_plan

    if args.sweep is not None and "periodic" not in args.eviction and args.replicas == 1:
        raise InvalidInput(
            f"--sweep without periodic in --eviction {args.eviction} and with --replicas 1: nothing would be swept"
        )
    return make_plan(
        args.preset,
        hosts=hosts,
        servers=args.servers,
        strategy=args.strategy,
        replicas=args.replicas,
        access=args.access,
        chunk_bytes=args.chunk,
        delay_scale=args.delay,
        memory_per_satellite_bytes=args.memory_per_satellite,
        epoch_s=float(round(time.time())),
        time_scale=args.time_scale,
        memory_policy=MemoryPolicy(args.eviction, args.replacement, 30.0 if args.sweep is None else args.sweep),
        ground=ground_of(args),
        faults=Faults(args.loss, args.duplicate, args.reorder, args.corrupt, args.fault_seed),
        **auth_of(args),
    )


def _directory(args: argparse.Namespace) -> RunDirectory:
    from skymemory.testbed.run_directory import RunDirectory

    return RunDirectory(args.run_dir)


def _processes(count: int) -> str:
    return "1 host process" if count == 1 else f"{count} host processes"


def _up(args: argparse.Namespace) -> int:
    from skymemory.testbed.signals import SignalGate
    from skymemory.testbed.supervisor import watch

    directory = _directory(args)
    if not args.foreground:
        _start(args, directory, None)
        print("next: skymemory constellation status | skymemory kv put FILE | skymemory constellation down")
        return 0
    with SignalGate() as gate:
        started = _start(args, directory, gate)
        print("Ctrl-C stops it", flush=True)
        return watch(directory, started, lambda words: print(words, file=sys.stderr, flush=True), gate)


def _start(args: argparse.Namespace, directory: RunDirectory, gate: SignalGate | None) -> Started:
    """Start the constellation that the options ask for, and say that it is up."""
    from skymemory.constellation.presets import preset_named
    from skymemory.testbed.carrying import check_time_scale
    from skymemory.testbed.control import confirm_all_answer
    from skymemory.testbed.plan import DEFAULT_BASE_PORT, DEFAULT_HOSTS, local_hosts
    from skymemory.testbed.supervisor import start, start_on_free_ports

    torus = preset_named(args.preset).torus
    hosts = min(DEFAULT_HOSTS, torus.planes) if args.hosts is None else args.hosts

    def plan_at(ports: int | Ports) -> ConstellationPlan:
        return _plan_of(args, local_hosts(args.preset, hosts, ports))

    check_time_scale(plan_at(args.base_port or DEFAULT_BASE_PORT))
    how: dict[str, Any] = {"foreground": args.foreground, "confirm": confirm_all_answer, "gate": gate}
    if args.base_port is None:
        started = start_on_free_ports(directory, plan_at, torus.size, **how)
    else:
        started = start(directory, plan_at(args.base_port), **how)
    plan = started.plan
    ports = [port for _, port in plan.addresses().values()]
    print(
        f"{plan.preset} is up: {torus.size} satellites in {_processes(hosts)} on ports {min(ports)} to "
        f"{max(ports)}, {format_size(plan.memory_bytes)} of memory, in {started.seconds:.2f} s",
        flush=True,
    )
    return started


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
        print(f"nothing was running in {directory.path}")
    else:
        print(f"stopped {_processes(stopped)}" + (f", {forced} of them by force" if forced else ""))
    return 0


def _rotate(args: argparse.Namespace) -> int:
    from skymemory.cli._status import print_rotation
    from skymemory.testbed.control import rotate
    from skymemory.testbed.plan_file import load_plan, one_at_a_time, save_plan

    directory = _directory(args)
    path = args.plan or directory.plan_path
    load_plan(path) if args.plan else directory.running_plan()  # there is one, or that is said
    with one_at_a_time(path):
        plan = load_plan(path) if args.plan else directory.running_plan()  # another may have moved it meanwhile
        report = rotate(plan, args.slots, args.planes)
        if path.exists() and load_plan(path) == plan:  # neither stopped nor started anew while we rotated
            slot_moves, plane_moves = report.moves_after
            save_plan(replace(plan, pushed_slot_moves=slot_moves, pushed_plane_moves=plane_moves), path)
    print_rotation(report, as_json=args.json)
    return 0 if report.complete else 1


def _write_plan(args: argparse.Namespace) -> int:
    from skymemory.testbed.plan import remote_hosts
    from skymemory.testbed.plan_file import save_plan

    addresses = []
    for text in args.host:
        ip, colon, port = text.rpartition(":")
        if not colon or not port.isdecimal():
            raise InvalidInput(f"host {text!r}: expected an address and a port such as 10.0.0.1:26000")
        addresses.append((ip, int(port)))
    plan = _plan_of(args, remote_hosts(args.preset, addresses))
    check_plan(plan, args.insecure)
    save_plan(plan, args.out)
    say_how_to_share(plan, args.out, args.insecure)
    return 0


def _attach(args: argparse.Namespace) -> int:
    from skymemory.testbed.plan_file import load_plan
    from skymemory.testbed.supervisor import attach

    directory = _directory(args)
    plan = load_plan(args.plan)
    attach(directory, plan)
    print(f"attached to {plan.preset} on {len(plan.hosts)} hosts; `skymemory constellation down` forgets it")
    return 0


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "up": _up, "status": _status, "down": _down, "rotate": _rotate, "plan": _write_plan,
        "attach": _attach, "layout": layout.run, "disable": _faults.disable, "enable": _faults.enable,
        "revive": _faults.revive,
    }  # fmt: skip
    return actions[args.action](args)
