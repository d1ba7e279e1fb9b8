"""Description of a serving cluster (``cluster.toml``): a store, instances by role, the router. Pure.

Example: docs/guide/disaggregated.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skymemory.addresses import host_and_port
from skymemory.config import filled, one_of, positive, setting, table, text, texts, whole_number, yes_or_no
from skymemory.errors import InvalidInput
from skymemory.files import read_toml
from skymemory.router.settings import settings_from
from skymemory.testbed.open_store import is_of_one_process

ROLES = {"prefill": "producer", "decode": "consumer", "both": "both"}
ENGINES = ("skymemory", "vllm")
MOST_INSTANCES = 64
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_RESERVED = ("constellation", "router", "store", "supervisor")


def _words_by_name(value: object) -> dict[str, str]:
    return {name: text(word) for name, word in table(value).items()}


def _resources(value: object) -> dict[str, float]:
    return {name: positive(amount) for name, amount in table(value).items()}


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in _RESERVED:
        raise InvalidInput(
            f"{value!r}: expected lower-case letters, digits and dashes, at most 40, and none of {', '.join(_RESERVED)}"
        )
    return value


@dataclass(frozen=True, slots=True)
class StoreSettings:
    address: str = setting("address", text, "", "a store that runs already, such as redis://cache:6379")
    serve: str = setting("serve", text, "", "a store to start, such as memory://1GiB")
    constellation: tuple[str, ...] | None = setting(
        "constellation", texts, None, "options of the `skymemory constellation up` to start"
    )

    def __post_init__(self) -> None:
        present = [bool(self.address), bool(self.serve), self.constellation is not None]
        if sum(present) != 1:
            raise InvalidInput("expected one of address, serve and constellation")
        if is_of_one_process(self.address):
            raise InvalidInput(
                f"address: {self.address!r} belongs to one process, and a cluster has several: write serve = "
                f"{self.address!r}"
            )


@dataclass(frozen=True, slots=True)
class Instances:
    name: str = setting("name", _name, "", "of the group; instances are NAME-1, NAME-2 …; default: the role")
    role: str = setting("role", one_of(*ROLES), "both", "prefill, decode or both")
    elastic: bool = setting(
        "elastic", yes_or_no, False, "started to do both; the router changes its role, at first this one, with the load"
    )
    engine: str = setting("engine", one_of(*ENGINES), "skymemory", "skymemory or vllm")
    count: int = setting("count", whole_number, 1, "number of instances")
    model: str = setting("model", text, "small", "as for the engine: a name or a folder")
    port: int = setting("port", whole_number, 0, "of the first; the others follow. 0: any free")
    options: tuple[str, ...] = setting("options", texts, (), "further options of the engine")
    environment: Mapping[str, str] = setting("environment", _words_by_name, {}, "environment variables")
    python: str = setting("python", text, "", "the Python that runs vLLM; default: this one")
    connector: Mapping[str, object] = setting("connector", table, {}, "further settings of vLLM's connector")
    resources: Mapping[str, float] = setting(
        "resources", _resources, {}, "that Ray sets aside for each: CPU (default: 1), GPU, memory in bytes, its own"
    )

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.role)
        if not 1 <= self.count <= MOST_INSTANCES:
            raise InvalidInput(f"count is {self.count}: expected 1 to {MOST_INSTANCES}")
        if self.port and self.port + self.count - 1 > 65535:
            raise InvalidInput(f"port: {self.count} instances from {self.port} on go beyond 65535")
        if self.engine != "vllm" and (self.python or self.connector):
            raise InvalidInput("python and connector are for engine = 'vllm'")
        if "store" in self.connector:
            raise InvalidInput("connector: store: the cluster's is used, see [store]")

    @property
    def engine_role(self) -> str:
        return ROLES["both" if self.elastic else self.role]

    @property
    def names(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(1, self.count + 1)]


@dataclass(frozen=True, slots=True)
class RouterPart:
    listen: str = setting("listen", text, "127.0.0.1:8080", "address to listen on; port 0: any free")
    settings: Mapping[str, object] = setting("settings", table, {}, "the router's settings, without backends")

    def __post_init__(self) -> None:
        host_and_port(self.listen)
        for key in ("backends", "listen"):
            if key in self.settings:
                raise InvalidInput(f"settings: {key}: it is written from this description")
        try:
            settings_from(self.settings)
        except InvalidInput as error:
            raise InvalidInput(f"settings: {error}") from error


@dataclass(frozen=True, slots=True)
class KubernetesPart:
    image: str = setting("image", text, "skymemory:latest", "of the router: deploy/Dockerfile")
    engine_image: str = setting("engine_image", text, "", "of our engine: `.[hf,router,redis]`, ./lab, ./models/small")
    vllm_image: str = setting("vllm_image", text, "", "of vLLM: with skymemory[redis]")
    gpus: int = setting("gpus", whole_number, 0, "GPUs (nvidia.com/gpu) of a vLLM instance")


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    name: str
    store: StoreSettings | None
    instances: tuple[Instances, ...]
    router: RouterPart | None
    kubernetes: KubernetesPart = KubernetesPart()

    def __post_init__(self) -> None:
        if not self.instances:
            raise InvalidInput("no instances: expected [[instances]] with a role, an engine and a model")
        names = [name for group in self.instances for name in (group.name, *group.names)]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidInput(f"instances: the name {duplicates[0]!r} comes twice: give each group its own name")
        ports = [(group.port + at, group.name) for group in self.instances if group.port for at in range(group.count)]
        if self.router is not None and (port := host_and_port(self.router.listen)[1]):
            ports.append((port, "router"))
        by_port: dict[int, str] = {}
        for port, name in ports:
            if port in by_port:
                raise InvalidInput(f"port {port} is both {by_port[port]}'s and {name}'s")
            by_port[port] = name
        self._check_roles()
        if elastic := [group for group in self.instances if group.elastic]:
            self._check_elastic(elastic[0].name)

    def _check_roles(self) -> None:
        split = [group for group in self.instances if group.role != "both"]
        if split and self.store is None:
            raise InvalidInput(f"{split[0].name}: role {split[0].role!r} needs a store: expected [store]")
        # Blocks of another model or another engine are never hit.
        for role, other in (("prefill", "decode"), ("decode", "prefill")):
            for group in split:
                peers = (peer for peer in self.instances if (peer.engine, peer.model) == (group.engine, group.model))
                if group.role == role and not any(peer.role in (other, "both") for peer in peers):
                    raise InvalidInput(
                        f"{group.name}: role {role!r} and no instance with role {other!r} or 'both' of the same engine "
                        "and model"
                    )

    def _check_elastic(self, name: str) -> None:
        if self.router is None:
            raise InvalidInput(f"{name}: elastic: the router changes the roles: expected [router]")
        backends = [
            {"url": "http://instance", "name": name, "role": group.role, "elastic": group.elastic}
            for group in self.instances
            for name in group.names
        ]
        try:
            settings_from({**self.router.settings, "backends": backends})
        except InvalidInput as error:
            raise InvalidInput(f"router: settings: {error}") from error


def read_description(path: Path) -> ClusterDescription:
    try:
        return description_of(read_toml(path))
    except InvalidInput as error:
        message = str(error)
        raise InvalidInput(message if str(path) in message else f"{path}: {message}") from error


_KEYS = ("name", "store", "instances", "router", "kubernetes")


@dataclass(frozen=True, slots=True)
class _Top:
    name: str = setting("name", _name, "cluster", "of the cluster")


def description_of(content: Mapping[str, Any]) -> ClusterDescription:
    groups = content.get("instances", [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InvalidInput("instances: expected [[instances]] tables, one for each group")
    parts = {key: content[key] for key in ("store", "router", "kubernetes") if key in content}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise InvalidInput(f"{key}: expected a table, [{key}]")
    top = filled(_Top, {key: value for key, value in content.items() if key not in _KEYS[1:]}, "", _KEYS)
    return ClusterDescription(
        name=top.name,
        store=filled(StoreSettings, parts["store"], "store") if "store" in parts else None,
        instances=tuple(
            filled(Instances, group, f"instances, number {number}") for number, group in enumerate(groups, 1)
        ),
        router=filled(RouterPart, parts["router"], "router") if "router" in parts else None,
        kubernetes=filled(KubernetesPart, parts.get("kubernetes", {}), "kubernetes"),
    )
