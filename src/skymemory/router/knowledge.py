"""What a strategy knows beyond the requests it was asked about: a file of its last life, and other replicas.

Where there are replicas the strategy asks an index that they share, else its own. (What engines tell of their blocks
comes in by `proxy_events`.)
"""

from __future__ import annotations

import logging

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.shared import SharedPrefixIndex
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.named import DEFAULT, NAMES, named, options_of
from skymemory.errors import InvalidInput
from skymemory.router.gossip import GossipReplicas
from skymemory.router.index_file import load_index, save_index
from skymemory.router.proxy_events import check_events, strategy_options
from skymemory.router.replicas import Replicas, ReplicaStatus
from skymemory.router.replicas_redis import RedisReplicas
from skymemory.router.settings import Settings

log = logging.getLogger("skymemory.router")


class Knowledge:
    """The strategy of ``settings`` and what feeds it. Start, follow and close it in one event loop."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        """
        Raises:
            InvalidInput: a strategy or an option that does not exist, or one that cannot use what is set up for it.
        """
        self._settings = settings
        self._fleet = fleet
        prompts = settings.prompts
        self._kind = f"bytes-{prompts.block_bytes}" if prompts.tokenizer is None else f"tokens-{prompts.block_tokens}"
        self.scorer = self._scorer(settings)
        self._index = getattr(self.scorer, "index", None)
        if settings.state is not None and not isinstance(self._index, ApproximatePrefixIndex):
            raise InvalidInput(f"state: strategy {self.scorer.name!r} has nothing that could be kept in a file")
        self._replicas: Replicas | None = None

    async def start(self) -> None:
        """To be called when the fleet is known: what is in the file is put where its servers are now."""
        if self._settings.state is not None and isinstance(self._index, ApproximatePrefixIndex):
            try:
                blocks = load_index(self._settings.state, self._index, self._kind, self._slots())
                log.info("%d blocks known from %s", blocks, self._settings.state)
            except InvalidInput as error:
                log.warning("beginning with nothing: %s", error)
        if isinstance(self._index, SharedPrefixIndex):
            self._replicas = self._replicas_of(self._index)
            await self._replicas.start()

    def replicas(self) -> ReplicaStatus | None:
        return None if self._replicas is None else self._replicas.status()

    async def close(self, keep: bool = True) -> None:
        """``keep``: write what is known to the file, if there is one."""
        if self._replicas is not None:
            await self._replicas.close()
        if keep and self._settings.state is not None and isinstance(self._index, ApproximatePrefixIndex):
            try:
                written = save_index(self._settings.state, self._index, self._kind, self._slots())
                log.info("what is known is kept in %s: %d bytes", self._settings.state, written)
            except InvalidInput as error:
                log.error("%s", error)

    def _slots(self) -> dict[str, int]:
        return {server.name: server.slot for server in self._fleet}

    def _scorer(self, settings: Settings) -> Scorer:
        name, options, replicas = settings.strategy or DEFAULT, strategy_options(settings), settings.replicas
        if not (replicas.redis or replicas.listen or replicas.peers):
            scorer = named(name, **options)
            check_events(settings, scorer)
            return scorer
        known = options_of(name) if name in NAMES else {}
        if name in NAMES and ("blocks_per_server" not in known or options.get("events")):
            raise InvalidInput(
                f"replicas: strategy {name!r} has nothing to share, or goes by events, as each of them can"
            )
        blocks = int(options.get("blocks_per_server", known.get("blocks_per_server", 1)))
        return named(name, index=SharedPrefixIndex(self._name_of, self._slot_of, blocks), **options)

    def _name_of(self, slot: int) -> str | None:
        return next((server.name for server in self._fleet if server.slot == slot), None)

    def _slot_of(self, name: str) -> int | None:
        server = self._fleet.servers.get(name)
        return None if server is None else server.slot

    def _replicas_of(self, index: SharedPrefixIndex) -> Replicas:
        replicas = self._settings.replicas
        if replicas.redis:
            return RedisReplicas(index, replicas.redis, self._kind)
        listen = replicas.listen or "127.0.0.1:0"
        return GossipReplicas(index, lambda: list(self._slots().values()), listen, replicas.peers, self._kind)
