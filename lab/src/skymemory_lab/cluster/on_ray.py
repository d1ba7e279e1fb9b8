"""Instances of a cluster on the nodes of a Ray cluster; its store and router run on the supervisor's node."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from skymemory.addresses import host_and_port
from skymemory.errors import InvalidInput, SkyMemoryError, missing_extra
from skymemory.files import write_private
from skymemory.router.tls import self_signed
from skymemory_lab.cluster.description import ClusterDescription, Instances, read_description
from skymemory_lab.cluster.services import Service, instance, ours, router, router_settings
from skymemory_lab.cluster.supervisor import (
    GRACE_S,
    ROUTER_FILE,
    SOCKET,
    STORE_CERTIFICATE,
    STORE_KEY,
    STORE_PASSWORD,
    RayPlan,
    ServiceState,
    Supervised,
    SupervisionPlan,
    Supervisor,
    free_ports,
    log_path,
)

LOST = "its node or its Ray worker was lost"
_CONNECT_S = 30.0
_LOOK_S = 0.25
_ANSWER_S = 5.0  # silence after which a keeper counts as unhealthy
_LOG_BYTES = 256 << 10

Log = logging.getLogger("skymemory.cluster")


def check(description: ClusterDescription) -> None:
    """Refuse a store of one computer, and missing packages."""
    store = description.store
    if store is not None and store.constellation is not None:
        raise InvalidInput(
            "store: a constellation is on this computer alone: on Ray expected serve = 'memory://SIZE', or address = "
            "'redis://HOST:PORT' of a store that all nodes reach"
        )
    if store is not None and store.address.startswith("unix:"):
        raise InvalidInput(
            f"store: {store.address!r} is a socket of this computer: on Ray expected one that all nodes reach, such as "
            "'redis://HOST:PORT'"
        )
    if importlib.util.find_spec("ray") is None:
        raise missing_extra("--on ray", "ray", "ray")
    if store is not None and store.serve:
        self_signed()  # raises MissingExtra


@dataclass(frozen=True, slots=True)
class Look:
    """State and new log of an instance."""

    keeper: str
    """Key, new after each start of the actor."""
    state: ServiceState
    log: bytes


@dataclass(frozen=True, slots=True)
class SharedStore:
    address: str = ""
    ca: str = ""
    """PEM of the store's authority; empty: the system's."""


class Keeper:
    """Ray actor that runs an instance on its node, and restarts it.

    If the node or worker is lost, Ray restarts the keeper on any node; the router reads the new address from its
    settings file. Keepers are not detached: they end with the supervisor.
    """

    def __init__(self, group: Instances, name: str, store: SharedStore) -> None:
        import ray

        self._folder = Path(tempfile.mkdtemp(prefix="skymemory-"))
        address = store.address
        if store.ca:
            write_private(self._folder / STORE_CERTIFICATE, store.ca)
            address += f"{'&' if '?' in address else '?'}ca={self._folder / STORE_CERTIFICATE}"
        host = ray.util.get_node_ip_address()
        port = group.port + group.names.index(name) if group.port else free_ports(1, host)[0]
        service = instance(group, name, host, port, address)
        self._key = secrets.token_hex(8)
        self._stopping = threading.Event()
        self._one = Supervised(service, self._folder, lambda: None, self._stopping)
        # An actor that Ray has reconstructed had a running instance before.
        self._one.restarts = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._thread = threading.Thread(target=self._one.run, name=name, daemon=True)
        self._thread.start()

    def poll(self, restarts: bool, log_from: int) -> Look:
        """Return the state and the log from ``log_from`` on. ``restarts``: restart the instance when it ends."""
        self._one.restarts = self._one.restarts or restarts
        state = replace(self._one.state)  # before the log, which then contains everything that led to this state
        with suppress(FileNotFoundError), log_path(self._folder, state.name).open("rb") as log:
            log.seek(log_from)
            return Look(self._key, state, log.read(_LOG_BYTES))
        return Look(self._key, state, b"")

    def stop(self, log_from: int) -> Look:
        self._stopping.set()
        self._thread.join()
        last = self.poll(False, log_from)
        shutil.rmtree(self._folder, ignore_errors=True)
        return last


def supervisor_on_ray(directory: Path, plan: RayPlan) -> Supervisor:
    """Connect to the Ray cluster, and plan the services.

    Raises:
        SkyMemoryError: no connection to the Ray cluster.
    """
    description = read_description(Path(plan.file))
    check(description)
    host = _connect(plan.address)
    store = SharedStore(description.store.address if description.store is not None else "")
    services: list[Service] = []
    if description.store is not None and description.store.serve:
        service, store = _served_store(description.store.serve, directory, host)
        services.append(service)
    addresses = _Addresses(directory / ROUTER_FILE, description)
    for name, group in addresses.groups.items():
        services.append(Service(name, "instance", (), "", role=group.role, engine=group.engine, model=group.model))
    if description.router is not None:
        router_host = host_and_port(description.router.listen)[0]
        services.append(router(description.router, str(directory / ROUTER_FILE), iter(free_ports(1, router_host))))

    def make(service: Service, *more: Any) -> Any:
        if service.kind != "instance":
            return Supervised(service, *more)
        return _OnRay(service, store, addresses, *more)

    return Supervisor(directory, SupervisionPlan(description.name, tuple(services)), make)


def _connect(address: str) -> str:
    import ray

    errors: list[Exception] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except Exception as error:  # of many types, all undocumented
            errors.append(error)

    # In a daemon thread, because it retries an unreachable address without a limit.
    connecting = threading.Thread(target=connect, name="connect", daemon=True)
    connecting.start()
    connecting.join(_CONNECT_S)
    if not errors and not connecting.is_alive():
        return str(ray.util.get_node_ip_address())
    why = str(errors[0]).strip().splitlines()[0] if errors else f"no answer within {_CONNECT_S:g} s"
    status = "found" if address == "auto" else f"reached at {address}"
    raise SkyMemoryError(
        f"no Ray cluster is {status} from this computer ({why}): make it a node by `ray start --address HEAD:6379`, or "
        "by `ray start --head` the first one; see `ray status`"
    )


def _served_store(store: str, directory: Path, host: str) -> tuple[Service, SharedStore]:
    """Plan a store daemon that other nodes reach, with its own certificate and password."""
    certificate = self_signed((host,))
    password = secrets.token_urlsafe(24)
    files = {STORE_CERTIFICATE: certificate.chain, STORE_KEY: certificate.key, STORE_PASSWORD: password.encode()}
    for name, content in files.items():
        write_private(directory / name, content)
    port = free_ports(1, host)[0]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    socket = f"unix://{directory / SOCKET}"
    words = ours(
        *("store", "serve", store, "--listen", socket, "--listen", f"tcp://{address}"),
        *("--tls-cert", str(directory / STORE_CERTIFICATE), "--tls-key", str(directory / STORE_KEY)),
        *("--password-file", str(directory / STORE_PASSWORD)),
    )
    shared = SharedStore(f"rediss://:{password}@{address}", certificate.chain.decode("ascii"))
    return Service("store", "store", words, f"rediss://{address}", health=socket), shared


class _Addresses:
    """Present addresses of the instances, for the router's settings file."""

    def __init__(self, file: Path, description: ClusterDescription) -> None:
        self._file, self._description = file, description
        self.groups = {name: group for group in description.instances for name in group.names}
        self._urls: dict[str, str] = {}
        self._lock = threading.Lock()

    def is_at(self, name: str, url: str) -> None:
        with self._lock:
            if self._urls.get(name) == url:
                return
            self._urls[name] = url
            if self._description.router is not None:
                backends = [
                    (instance_name, self._urls[instance_name], group.role)
                    for instance_name, group in self.groups.items()
                    if instance_name in self._urls
                ]
                write_private(self._file, router_settings(self._description, backends))


class _OnRay:
    """Counterpart of ``Supervised`` for an actor."""

    def __init__(
        self,
        service: Service,
        store: SharedStore,
        addresses: _Addresses,
        directory: Path,
        on_changed: Callable[[], None],
        stopping: threading.Event,
    ) -> None:
        self.service = service
        self.restarts = False
        self._group = group = addresses.groups[service.name]
        self.state = ServiceState(service.name, service.kind, group.role, group.engine, group.model, "")
        self._store, self._addresses = store, addresses
        self._log = log_path(directory, service.name)
        self._changed, self._stopping = on_changed, stopping
        self._keeper = ""
        self._earlier = 0  # restarts before the present keeper
        self._log_bytes = 0

    def run(self) -> None:
        import ray

        actor: Any = (
            ray.remote(Keeper).options(**actor_options(self._group)).remote(self._group, self.service.name, self._store)
        )
        pending: Any = None
        answered_s = time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            try:
                pending = pending or actor.poll.remote(self.restarts, self._log_bytes)
                answer, pending = ray.get(pending, timeout=_LOOK_S), None
            except ray.exceptions.GetTimeoutError:
                # Not placed yet; or its node is silent, and Ray does not know yet if it is lost.
                if self._keeper and self.state.state != "restarting" and time.monotonic() - answered_s > _ANSWER_S:
                    self._show(replace(self.state, state="unhealthy"))
                continue
            except ray.exceptions.ActorUnavailableError:
                pending = None
                if self._keeper:
                    self._show(replace(self.state, state="restarting", pid=None, last_end=LOST))
                continue
            except ray.exceptions.RayError as error:  # the actor cannot be started at all
                self._show(replace(self.state, state="ended", pid=None, last_end=_reason(error)))
                return
            answered_s = time.monotonic()
            self._take(answer)
            # It ended after its start and before it learned that it shall restart.
            if answer.state.state == "ended" and self.restarts:
                ray.kill(actor, no_restart=False)
        with suppress(ray.exceptions.RayError):
            if self._keeper:
                self._take(ray.get(actor.stop.remote(self._log_bytes), timeout=GRACE_S + _ANSWER_S))
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)
        self._show(replace(self.state, state="ended", pid=None))

    def _take(self, look: Look) -> None:
        if look.keeper != self._keeper:
            if self._keeper:
                self._earlier = self.state.restarts + 1
            self._keeper = look.keeper
            if self._log_bytes:  # the request was about the log of the previous keeper
                self._log_bytes = 0
                return
        with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as log:
            log.write(look.log)
        self._log_bytes += len(look.log)
        if look.state.state == "ended" and len(look.log) == _LOG_BYTES:
            return  # the remaining log comes first
        state = look.state
        if state.state == "healthy":
            self._addresses.is_at(state.name, state.address)
        # Pids and start times belong to another computer: they must not be taken for a process of this computer.
        self._show(
            replace(
                state,
                start="",
                restarts=self._earlier + state.restarts,
                last_end=state.last_end or (LOST if self._earlier else ""),
            )
        )

    def _show(self, state: ServiceState) -> None:
        if self.state != state:
            for state_field in fields(state):
                setattr(self.state, state_field.name, getattr(state, state_field.name))
            self._changed()


def actor_options(group: Instances) -> dict[str, Any]:
    wanted = {"CPU": 1.0, **group.resources}
    ray_names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    standard = {ray_names[name]: amount for name, amount in wanted.items() if name in ray_names}
    custom = {name: amount for name, amount in wanted.items() if name not in ray_names}
    return {**standard, "resources": custom, "max_restarts": -1, "scheduling_strategy": "SPREAD"}


def _reason(error: Exception) -> str:
    Log.error("%s", error)
    cause = getattr(error, "cause", None)
    lines: Sequence[str] = [line.strip() for line in str(cause or error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
