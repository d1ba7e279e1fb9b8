"""What a strategy knows beyond the requests it was asked about: a file of its last life, and other replicas.

Where there are replicas the strategy asks an index that they share, else its own. (What engines tell of their blocks
comes in by `proxy_events`.)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from skymemory.conductor.fleet import Fleet
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.prefix_index.replicated import (
    Held,
    SharedPrefixIndex,
    Snapshot,
    pack_snapshot,
    restore,
    take_snapshot,
    unpack_snapshot,
)
from skymemory.conductor.strategies.base import Scorer
from skymemory.conductor.strategies.named import DEFAULT, STRATEGIES, named
from skymemory.errors import InvalidInput, LaterFile
from skymemory.files import MAX_TOKENIZER_BYTES, read_bounded, write_private
from skymemory.keys import KeyRing
from skymemory.router.deferred import ended
from skymemory.router.engines.events import check_events, event_index, strategy_options
from skymemory.router.replicas import RedisReplicas, ReplicaStatus
from skymemory.router.settings import Settings, read_cost

log = logging.getLogger("skymemory.router")

SAVE_S = 60.0
"""Between two writings of the file; it is written at the end, too."""


class Knowledge:
    """The strategy of ``settings`` and what feeds it. Start, follow and close it in one event loop."""

    def __init__(self, settings: Settings, fleet: Fleet, keys: KeyRing | None = None) -> None:
        """``keys``: what replicas show each other that they have.

        Raises:
            InvalidInput: a strategy or an option that does not exist, or one that cannot use what is set up for it.
        """
        self._settings = settings
        self._fleet = fleet
        self._kind = kind_of_blocks(settings)
        self.scorer = self._scorer(settings)
        self._index = getattr(self.scorer, "index", None)
        if settings.state is not None and not isinstance(self._index, ApproximatePrefixIndex):
            raise InvalidInput(f"state: strategy {self.scorer.name!r} has nothing that could be kept in a file")
        self._replicas: RedisReplicas | None = None
        if isinstance(self._index, SharedPrefixIndex):
            self._replicas = RedisReplicas(self._index, settings.replicas.redis, self._kind, keys=keys)
        self._saving: asyncio.Task[None] | None = None
        self._keeps = settings.state is not None
        """Whether the file is ours to write: one of a later release stays as it is."""
        self.unsaved = ""
        """Why the file could not be written the last time."""

    async def start(self) -> None:
        """To be called when the fleet is known: what is in the file is put where its servers are now."""
        if self._settings.state is not None and isinstance(self._index, ApproximatePrefixIndex):
            try:
                blocks = load_index(self._settings.state, self._index, self._kind, self._slots())
                log.info("%d blocks known from %s", blocks, self._settings.state)
            except LaterFile as error:
                self.unsaved = f"what is learnt is not kept: {error}, and the file stays as it is"
                self._keeps = False
                log.warning("beginning with nothing: %s", self.unsaved)
            except InvalidInput as error:
                log.warning("beginning with nothing: %s", error)
            self._saving = asyncio.create_task(self._save_for_ever())
        if self._replicas is not None:
            await self._replicas.start()

    def replicas(self) -> ReplicaStatus | None:
        return None if self._replicas is None else self._replicas.status()

    async def close(self, keep: bool = True) -> None:
        """``keep``: write what is known to the file, if there is one."""
        if self._replicas is not None:
            await self._replicas.close()
        await ended([self._saving])
        if keep and (written := await self._save()):
            log.info("what is known is kept in %s: %d bytes", self._settings.state, written)

    def troubles(self) -> list[str]:
        """What is not as it should be, though requests are served."""
        found = [self.unsaved] if self.unsaved else []
        status = self.replicas()
        if status is not None and status.degraded:
            found.append(f"what other routers learn is not known here ({status.kind}): {status.degraded}")
        return found

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> int:
        """Bytes written; 0: there is no file, or it cannot be written. Requests get their turn meanwhile."""
        index, path = self._index, self._settings.state
        if path is None or not self._keeps or not isinstance(index, ApproximatePrefixIndex):
            return 0
        held = {}
        for name, slot in self._slots().items():
            held[name] = Held(index.capacity_of(slot), index.dump(slot))
            await asyncio.sleep(0)
        try:
            written = await asyncio.to_thread(write_snapshot, path, Snapshot(self._kind, held))
        except InvalidInput as error:
            if not self.unsaved:
                log.error("%s", error)
            self.unsaved = str(error)
            return 0
        self.unsaved = ""
        return written

    def _slots(self) -> dict[str, int]:
        return {server.name: server.slot for server in self._fleet}

    def _scorer(self, settings: Settings) -> Scorer:
        name, options, shares = settings.strategy or DEFAULT, strategy_options(settings), bool(settings.replicas.redis)
        if settings.cost is not None and name != DEFAULT:
            raise InvalidInput(f"cost: strategy {name!r} does not count in seconds; {DEFAULT!r} does")
        cost = None if settings.cost is None else read_cost(settings.cost)
        known = STRATEGIES.options_of(name) if name in STRATEGIES else {}
        learns = "blocks_per_server" in known and not options.get("events")
        if name in STRATEGIES and shares and not learns:
            raise InvalidInput(
                f"replicas: strategy {name!r} has nothing to share, or goes by events, as each of them can"
            )
        secret = int.from_bytes(os.urandom(8), "little") | 1  # whoever sends prompts cannot foresee their places
        if not learns:
            scorer = named(name, cost=cost, **options)
            check_events(settings, scorer)
            if event_index(scorer) is None:
                return scorer
            own = PreciseIndex(int(options["block_tokens"]), secret=secret)
            return named(name, index=own, cost=cost, **options)
        named(name, **options)  # an option that does not exist is said before its value is used
        blocks = int(options.get("blocks_per_server", known["blocks_per_server"]))
        most = int(options.get("max_match_blocks", known.get("max_match_blocks", 0))) or None
        index = (
            SharedPrefixIndex(self._name_of, self._slot_of, blocks, most, secret)
            if shares
            else ApproximatePrefixIndex(blocks, most, secret)
        )
        return named(name, index=index, cost=cost, **options)

    def _name_of(self, slot: int) -> str | None:
        return next((server.name for server in self._fleet if server.slot == slot), None)

    def _slot_of(self, name: str) -> int | None:
        server = self._fleet.servers.get(name)
        return None if server is None else server.slot


def kind_of_blocks(settings: Settings) -> str:
    """What must be the same for hashes to mean the same.

    Raises:
        InvalidInput: the tokenizer's file cannot be read.
    """
    prompts = settings.prompts
    if prompts.tokenizer is None:
        return f"bytes-{prompts.block_bytes}"
    file = prompts.tokenizer / "tokenizer.json" if prompts.tokenizer.is_dir() else prompts.tokenizer
    try:
        digest = hashlib.sha256(read_bounded(file, MAX_TOKENIZER_BYTES)).hexdigest()[:16]
    except OSError as error:
        raise InvalidInput(f"no tokenizer at {file}: {error.strerror}") from None
    return f"tokens-{prompts.block_tokens}-{digest}"


class ReplicaFigures(Collector):
    """For /metrics; nothing where there are no replicas."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        status = self._knowledge.replicas()
        if status is None:
            return
        degraded = GaugeMetricFamily(
            "skymemory_router_replicas_degraded", "1: what replicas learn is not shared", labels=["kind"]
        )
        degraded.add_metric([status.kind], float(bool(status.degraded)))
        yield degraded
        deltas = CounterMetricFamily(
            "skymemory_router_replica_deltas", "What was learnt and shared, by what became of it", labels=["outcome"]
        )
        counts = {"sent": status.sent, "received": status.received, "lost": status.lost, "refused": status.refused}
        for outcome, count in counts.items():
            deltas.add_metric([outcome], count)
        yield deltas


# A prefix index in a file: what a router that restarts finds of what it knew.
#
# The file is replaced as a whole: whoever reads it has the old one or the new one. A precise index is not kept: an
# engine
# that restarted meanwhile could not be told from one that did not.


MAX_FILE_BYTES = 4 << 30


def save_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Write what ``slots`` (by name) hold; the file's size in bytes.

    Raises:
        InvalidInput: a file that cannot be written. What was there is still there then.
    """
    return write_snapshot(path, take_snapshot(index, kind, slots))


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """As ``save_index``, with what was taken before: packing and writing can go on in a thread."""
    data = pack_snapshot(snapshot)
    try:
        write_private(path, data, durable=True)
    except OSError as error:
        raise InvalidInput(f"the index cannot be kept in {path}: {error.strerror or error}") from None
    return len(data)


def load_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Put what the file has of ``slots`` (by name) into ``index``; how many blocks. None: no file, an index as it was.

    Raises:
        InvalidInput: a file that cannot be read, is damaged, of another version or of other blocks. The index is empty
            then, and a router says so and goes on.
    """
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise InvalidInput(f"the index in {path} cannot be read: {error.strerror or error}") from None
    try:
        return restore(index, unpack_snapshot(data), kind, slots)
    except InvalidInput as error:
        raise type(error)(f"{path}: {error}") from None
