"""Which names are LoRA adapters, by what engines report of those they have loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from skymemory.conductor.fleet import Fleet


class FleetAdapters(Mapping[str, str]):
    """Adapter → the model that it is for, which reports do not tell: empty. Read anew at each look, kept nowhere.

    A report that is old still tells names: an adapter does not become a model because its engine is silent.
    """

    def __init__(self, fleet: Fleet, named: Callable[[], Collection[str]] = tuple) -> None:
        """``named``: those that are known without a report."""
        self._fleet = fleet
        self._named = named

    def __getitem__(self, name: str) -> str:
        if name in self._named():
            return ""
        for server in list(self._fleet.servers.values()):  # a copy: prompts may be read in another thread
            if server.reported is not None and name in server.reported.adapters:
                return ""
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        reported = {name for server in self._fleet if server.reported for name in server.reported.adapters}
        return iter(reported | set(self._named()))

    def __len__(self) -> int:
        return sum(1 for _ in self)
