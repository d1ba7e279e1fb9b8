"""The endpoints that a picker knows: who came, who left, who serves which model. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skymemory.conductor.fleet import Server
from skymemory.conductor.picker import Picker
from skymemory.conductor.request import Request
from skymemory.router.settings import Backend


@dataclass(slots=True, eq=False)
class Endpoint:
    backend: Backend
    server: Server
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it lists itself. A picker does not ask."""


class Endpoints:
    """``update`` makes the fleet what a source says."""

    def __init__(self, picker: Picker) -> None:
        self.known: dict[str, Endpoint] = {}
        self.adapters: frozenset[str] = frozenset()
        """Those that settings name, beside what engines report."""
        self._picker = picker
        self._serving: dict[str, frozenset[str]] = {}

    def update(self, backends: Sequence[Backend]) -> tuple[list[str], list[str]]:
        """(came, left). Those that stay keep what is known of them."""
        wanted = {backend.name: backend for backend in backends}
        left = [server.name for server in self._picker.fleet if server.name not in wanted]
        came = [name for name in wanted if name not in self._picker.fleet.servers]
        for name in left:
            self.known.pop(name, None)
            self._picker.remove(name)
        for name, backend in wanted.items():
            server = self._picker.fleet.servers.get(name) or self._picker.fleet.add(name)
            server.draining = backend.drain
            self.known.setdefault(name, Endpoint(backend, server)).backend = backend
        self.adapters = frozenset(adapter for backend in wanted.values() for adapter in backend.adapters)
        every = {each for backend in wanted.values() for each in (*backend.models, *backend.adapters)}
        silent = {name for name, backend in wanted.items() if not backend.models}
        self._serving = {
            each: frozenset(silent | {n for n, b in wanted.items() if each in b.models or each in b.adapters})
            for each in every
        }
        return came, left

    def serving(self, request: Request) -> frozenset[str] | None:
        """Who says that it serves its adapter or model, and who says nothing of models. None: nobody says it, so
        anybody may be asked, and answers that it does not exist.
        """
        return self._serving.get(request.adapter or request.model)
