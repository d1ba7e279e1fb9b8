"""``skymemory cluster``: a store, prefill and decode instances and a router, here or on Ray's nodes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skymemory.cli._options import add_json, check_router_installed, check_serving_installed, duration
from skymemory.errors import InvalidInput, SkyMemoryError, os_reason
from skymemory.text import Table, write_line

if TYPE_CHECKING:
    from skymemory.cli.main import Subparsers
    from skymemory.testbed.supervisor import SignalGate
    from skymemory_lab.cluster.description import ClusterDescription
    from skymemory_lab.cluster.services import Service
    from skymemory_lab.cluster.supervisor import ClusterState, RayPlan

_STAY = b"stay\n"
_POLL_S = 0.1
_END_S = 60.0
_RAY_START_S = 300.0
_ASK_S = 2.0
_SKY = "sky"


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "cluster",
        help="run a serving cluster from one description",
        description="Run a serving cluster, as cluster.toml describes it: a store or constellation, instances that "
        "prefill and decode, and the router.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser(
        "up",
        help="start all of it on this computer, or on Ray",
        description="Start all of it on this computer, wait until it is healthy, and leave it running: what ends is "
        "started again. Where anything does not start, nothing is left running. On Ray the instances are on the nodes "
        "of a running Ray cluster, as far as their resources are free; this computer, with the store and the router, "
        "must be one of them.",
    )
    up.add_argument("file", type=Path, metavar="FILE", help="the description, such as cluster.toml")
    up.add_argument(
        "--on",
        choices=("processes", "ray"),
        default="processes",
        help="where instances run: here (processes, default), or on the Ray cluster of RAY_ADDRESS, else on that of "
        "this computer",
    )
    up.add_argument(
        "--timeout",
        type=duration,
        metavar="TIME",
        help="until all must be healthy (default: as long as a process that starts makes progress; on Ray 5m)",
    )
    up.add_argument("--foreground", action="store_true", help="stay, and end it all on Ctrl-C")
    _add_run_dir(up)
    status = actions.add_parser("status", help="state of each process; exit code 1 unless all are healthy")
    _add_run_dir(status)
    add_json(status)
    logs = actions.add_parser("logs", help="the end of one process's log")
    logs.add_argument("name", metavar="NAME", help="as in `skymemory cluster status`; or supervisor")
    logs.add_argument("--lines", type=int, default=50, metavar="N", help="at most as many (default: 50)")
    _add_run_dir(logs)
    _add_run_dir(actions.add_parser("down", help="end all of it"))
    manifests = actions.add_parser("manifests", help="print Kubernetes manifests of the same cluster")
    manifests.add_argument("file", type=Path, metavar="FILE", help="the description, with [kubernetes] for images")
    supervise = actions.add_parser("supervise")  # started by `up`; not in the help
    _add_run_dir(supervise)
    actions._choices_actions = [action for action in actions._choices_actions if action.dest != "supervise"]


def _manifests(file: Path) -> int:
    from skymemory_lab.cluster.description import read_description
    from skymemory_lab.cluster.manifests import as_yaml, manifests

    description = read_description(file)
    try:
        print(as_yaml(manifests(description)), end="")
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}") from error
    return 0


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where its state and logs are (default: cluster in $SKYMEMORY_RUN_DIR, else in a folder for this user)",
    )


def run(args: argparse.Namespace) -> int:
    check_router_installed()
    from skymemory.testbed.run_directory import default_run_directory

    if args.action == "manifests":
        return _manifests(args.file)
    directory = (args.run_dir or default_run_directory() / "cluster").absolute()
    if args.action == "up":
        return _up(args, directory)
    if args.action == "status":
        return _status(directory, as_json=args.json)
    if args.action == "logs":
        return _logs(directory, args.name, args.lines)
    return _down(directory) if args.action == "down" else _supervise(directory)


def _up(args: argparse.Namespace, directory: Path) -> int:
    from skymemory.testbed.run_directory import RunDirectory
    from skymemory.testbed.supervisor import SignalGate
    from skymemory_lab.cluster.description import read_description
    from skymemory_lab.cluster.supervisor import SupervisionPlan, log_path, write_plan

    description = read_description(args.file)
    if any(group.engine == "skymemory" for group in description.instances):
        check_serving_installed()
    ray = _ray_plan(args, description)
    runs = RunDirectory(directory)
    runs.create()
    with SignalGate() as gate, ExitStack() as undo:
        with runs.locked():
            _refuse_if_running(directory)
            undo.callback(_sweep, directory)
            _sweep(directory)
            services, sky = ([], "") if ray is not None else _planned(description, directory)
            for name in ["store", "router", *(name for group in description.instances for name in group.names)]:
                log_path(directory, name).unlink(missing_ok=True)
            if description.store is not None and description.store.constellation is not None:
                undo.callback(_constellation, "down", "--run-dir", sky)
                _constellation("up", "--run-dir", sky, *description.store.constellation)
            gate.check()
            write_plan(directory, SupervisionPlan(description.name, tuple(services), sky, ray))
            supervisor = _spawn_supervisor(directory)
            undo.callback(_end_started, supervisor)
            state = _await_ready(directory, supervisor, args.timeout, gate, ray is not None)
        _print_table(state)
        if args.foreground:
            write_line("until Ctrl-C")
            while not gate.closed and supervisor.poll() is None:
                time.sleep(_POLL_S)
            return 0
        assert supervisor.stdin is not None
        supervisor.stdin.write(_STAY)
        supervisor.stdin.close()
        undo.pop_all()
    return 0


def _ray_plan(args: argparse.Namespace, description: ClusterDescription) -> RayPlan | None:
    if args.on != "ray":
        return None
    from skymemory_lab.cluster.on_ray import check
    from skymemory_lab.cluster.supervisor import RayPlan

    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise InvalidInput(
            f"RAY_ADDRESS={address}: expected HOST:PORT of the Ray cluster's head, such as 10.0.0.1:6379"
        )
    check(description)
    return RayPlan(str(args.file.absolute()), address or "auto")


def _refuse_if_running(directory: Path) -> None:
    from skymemory.testbed.run_directory import ProcessRecord
    from skymemory_lab.cluster.supervisor import read_state

    state = read_state(directory)
    if state is None:
        return
    alive = [
        service
        for service in state.services
        if service.pid is not None and ProcessRecord(service.pid, service.start).alive
    ]
    if state.supervised or alive:
        raise SkyMemoryError(
            f"the cluster {state.name!r} runs already in {directory}: see `skymemory cluster status`, end it with "
            "`skymemory cluster down`"
        )


def _planned(description: ClusterDescription, directory: Path) -> tuple[list[Service], str]:
    """Return the services and the constellation's run directory; write the router's settings."""
    from skymemory.files import write_private
    from skymemory_lab.cluster.services import ports_wanted, router_settings, services
    from skymemory_lab.cluster.supervisor import ROUTER_FILE, SOCKET, free_ports

    store, sky = "", ""
    if description.store is not None:
        store = description.store.address or f"unix://{directory / SOCKET}"
        if description.store.constellation is not None:
            sky = str(directory / _SKY)
            store = f"constellation://{sky}"
    router_file = directory / ROUTER_FILE
    ports = free_ports(ports_wanted(description))
    planned = services(description, store, str(directory / SOCKET), str(router_file), ports)
    _check_ports(planned)
    backends = [(service.name, service.address, service.role) for service in planned if service.kind == "instance"]
    write_private(router_file, router_settings(description, backends))
    return planned, sky


def _check_ports(services: Sequence[Service]) -> None:
    from urllib.parse import urlsplit

    from skymemory_lab.cluster.supervisor import address_family

    for service in services:
        if not service.health:
            continue
        parts = urlsplit(service.address)
        with socket.socket(address_family(parts.hostname or "")) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((parts.hostname or "", parts.port or 0))
            except OSError as error:
                raise InvalidInput(
                    f"{service.name} cannot listen at {service.address}: {os_reason(error)}: give another port"
                ) from error


_CONSTELLATION_S = 600.0


def _constellation(*words: str) -> None:
    try:
        process = subprocess.run(
            [sys.executable, "-m", "skymemory.cli.main", "constellation", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,  # Ctrl-C ends this process, which ends the child
            check=False,
            timeout=_CONSTELLATION_S,
        )
    except subprocess.TimeoutExpired:
        raise SkyMemoryError(
            f"`skymemory constellation {words[0]}` has not ended within {_CONSTELLATION_S:g} s, and was killed"
        ) from None
    if process.returncode:
        last = process.stderr.strip().removeprefix("skymemory: ")
        raise SkyMemoryError(
            f"`skymemory constellation {words[0]}` failed: {last or f'exit code {process.returncode}'}"
        )


def _spawn_supervisor(directory: Path) -> subprocess.Popen[bytes]:
    with (directory / "supervisor.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "skymemory.cli.main", "cluster", "supervise", "--run-dir", str(directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )


def _await_ready(
    directory: Path, supervisor: subprocess.Popen[bytes], timeout_s: float | None, gate: SignalGate, on_ray: bool
) -> ClusterState:
    # Return the state once all services were healthy at once; None as timeout: wait while processes progress.
    from skymemory.testbed.liveness import MOST_S, StartWait
    from skymemory_lab.cluster.supervisor import log_tail, read_state

    # Processes on other nodes of a Ray cluster cannot be inspected from here.
    follows = timeout_s is None and not on_ray
    if timeout_s is None:
        timeout_s = _RAY_START_S if on_ray else MOST_S
    deadline_s = time.monotonic() + timeout_s
    waits: dict[int, StartWait] = {supervisor.pid: StartWait("the supervisor", supervisor.pid)}
    while True:
        gate.check()
        has_ended = supervisor.poll() is not None
        state = read_state(directory)
        if state is not None and state.ready and not has_ended:
            return state
        if has_ended:
            reason = (state.failure if state is not None else "") or log_tail(directory, "supervisor")
            raise SkyMemoryError(f"{reason or 'the supervisor ended'}\nall processes were ended")
        starting = (
            {service.pid: service.name for service in state.services if service.pid and service.state != "healthy"}
            if state
            else {}
        )
        for pid, name in starting.items():
            if pid not in waits and not on_ray:
                waits[pid] = StartWait(name, pid, partial(log_tail, directory, name))
        late = [waits[pid] for pid in starting if pid in waits] or [waits[supervisor.pid]]
        # A service that waits for another is idle itself: wait for all as long as any makes progress.
        over = [wait.is_over() for wait in late]
        if follows and all(over):
            raise SkyMemoryError(f"{late[0].error()}; all processes were ended; their logs are in {directory}")
        if time.monotonic() > deadline_s:
            room = "; `ray status` says what is free on its nodes" if on_ray else ""
            states = [f"{service.name} is {service.state}" for service in (state.services if state is not None else [])]
            raise SkyMemoryError(
                f"not healthy after {timeout_s:g} s: {', '.join(states) or 'none'}; all processes were ended; their "
                f"logs are in {directory}{room}"
            )
        time.sleep(_POLL_S)


def _end_started(supervisor: subprocess.Popen[bytes]) -> None:
    if supervisor.stdin is not None:
        with suppress(OSError):
            supervisor.stdin.close()
    try:
        supervisor.wait(_END_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # its services end with it
        supervisor.wait()


def _sweep(directory: Path) -> None:
    # Delete the files of an earlier run, but its logs.
    from skymemory_lab.cluster.supervisor import RUN_FILES

    for name in RUN_FILES:
        (directory / name).unlink(missing_ok=True)


def _supervise(directory: Path) -> int:
    import threading

    from skymemory_lab.cluster.supervisor import Supervisor, read_plan, write_failure

    plan = read_plan(directory)
    if plan is None:
        raise InvalidInput(f"no plan in {directory}: this is what `skymemory cluster up` starts")
    supervisor: Supervisor | None = None

    def follow() -> None:
        if sys.stdin.buffer.readline() != _STAY:  # `up` has ended without the message
            if supervisor is None:  # nothing was started, and connecting to Ray cannot be interrupted
                os._exit(1)
            supervisor.stop()

    threading.Thread(target=follow, name="follow", daemon=True).start()
    if plan.ray is not None:
        from skymemory_lab.cluster.on_ray import supervisor_on_ray

        try:
            supervisor = runner = supervisor_on_ray(directory, plan.ray)
        except SkyMemoryError as error:
            write_failure(directory, plan.name, str(error))
            os._exit(1)  # a thread that still tries to connect would crash at exit
    else:
        supervisor = runner = Supervisor(directory, plan)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: runner.stop())
    return 0 if runner.run() else 1


def _state(directory: Path) -> ClusterState:
    from skymemory_lab.cluster.supervisor import read_state

    state = read_state(directory)
    if state is None:
        raise SkyMemoryError(f"no cluster runs in {directory}: start one with `skymemory cluster up FILE`")
    return state


def _status(directory: Path, *, as_json: bool) -> int:
    from skymemory_lab.cluster.supervisor import as_object

    state = _state(directory)
    _ask_roles(state)
    if as_json:
        print(json.dumps(as_object(state), indent=2))
    else:
        _print_table(state)
        if not state.supervised:
            write_line("its supervisor is gone: nothing is started again; `skymemory cluster down` ends what is left")
    return 0 if state.supervised and all(service.state == "healthy" for service in state.services) else 1


def _ask_roles(state: ClusterState) -> None:
    import urllib.error
    import urllib.request

    for router in (service for service in state.services if service.kind == "router" and service.pid is not None):
        answer: Any
        try:
            try:
                answer = urllib.request.urlopen(f"{router.address}/ready", timeout=_ASK_S)
            except urllib.error.HTTPError as error:  # 503: no server is ready, but the answer has their roles
                answer = error
            with answer:
                page = json.load(answer)
        except (OSError, ValueError):
            continue
        roles = {service["name"]: service["role"] for service in page.get("servers", ())}
        for service in state.services:
            service.role = roles.get(service.name, service.role)


def _print_table(state: ClusterState) -> None:
    head = ("name", "role", "engine", "state", "pid", "restarts", "address", "")
    rows = []
    for service in state.services:
        pid = "" if service.pid is None else str(service.pid)
        last = f"last: {service.last_end}" if service.last_end else ""
        role = service.role or service.kind
        rows.append(
            (service.name, role, service.engine, service.state, pid, str(service.restarts), service.address, last)
        )
    Table(head, rows, left=(0, 1, 2, 3, 6, 7)).print()


def _logs(directory: Path, name: str, lines: int) -> int:
    from skymemory.config import suggestion
    from skymemory_lab.cluster.supervisor import log_tail

    if lines < 1:
        raise InvalidInput(f"--lines {lines}: expected 1 or more")
    names = sorted(path.stem for path in directory.glob("*.log"))
    if name not in names:
        raise InvalidInput(f"no log of {name!r} in {directory}; {suggestion(name, names)}")
    for line in log_tail(directory, name, 1 << 20).splitlines()[-lines:]:
        print(line)
    return 0


def _down(directory: Path) -> int:
    from skymemory.testbed.run_directory import RunDirectory
    from skymemory_lab.cluster.supervisor import end_orphans, end_supervisor, read_plan, read_state

    state = read_state(directory) if directory.is_dir() else None
    if state is None:
        write_line(f"no cluster runs in {directory}")
        return 0
    with RunDirectory(directory).locked():
        plan = read_plan(directory)
        if state.supervised:
            end_supervisor(state, _END_S)
        orphans = end_orphans(state)
        if plan is not None and plan.constellation:
            _constellation("down", "--run-dir", plan.constellation)
        _sweep(directory)
    killed = f", {orphans} of them by force: their supervisor was gone" if orphans else ""
    write_line(f"the cluster {state.name!r} has ended: {len(state.services)} processes{killed}")
    return 0
