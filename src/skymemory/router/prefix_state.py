"""Strategy of a router and its prefix index, kept in a file; and the exchange with replicas.

An index fed by KV events is not kept: a restarted engine could not be recognised.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skymemory.conductor.picker import Fleet, Picker, Scorer
from skymemory.conductor.prefix_index.approximate import ApproximatePrefixIndex
from skymemory.conductor.prefix_index.precise import PreciseIndex
from skymemory.conductor.prefix_index.replicated import (
    Held,
    SharedPrefixIndex,
    Snapshot,
    pack_snapshot,
    restore,
    unpack_snapshot,
)
from skymemory.conductor.sharing.messages import SENDER_BYTES
from skymemory.conductor.sharing.replica_state import ReplicaState
from skymemory.conductor.strategies.registry import DEFAULT, STRATEGIES, named
from skymemory.errors import InvalidInput, LaterFile, os_reason
from skymemory.files import MAX_TOKENIZER_BYTES, read_bounded, write_private
from skymemory.keys import KeyRing
from skymemory.router.engines.events import check_events, event_index, strategy_options
from skymemory.router.peers import PeerExchange
from skymemory.router.replicas import RedisReplicas, ReplicaStatus, StreamSettings
from skymemory.router.router_metrics import family
from skymemory.router.settings import ReplicaSettings, Settings, read_cost
from skymemory.router.tasks import cancel

log = logging.getLogger("skymemory.router")

SAVE_S = 60.0
REVIEW_S = 0.2
MAX_FILE_BYTES = 4 << 30


class PrefixState:
    """Strategy (``scorer``) and its index. Start and close it in the same event loop."""

    def __init__(self, settings: Settings, fleet: Fleet, keys: KeyRing | None = None) -> None:
        """``keys`` authenticate replicas."""
        self._settings = settings
        self._fleet = fleet
        self._kind = kind_of_blocks(settings)
        self.scorer = self._create_scorer(settings)
        self._index = getattr(self.scorer, "index", None)
        if settings.state is not None and not isinstance(self._index, ApproximatePrefixIndex):
            raise InvalidInput(f"state: strategy {self.scorer.name!r} has no index that can be kept in a file")
        self._replicas: RedisReplicas | None = None
        self._peers: PeerExchange | None = None
        self._sharing: ReplicaState | None = None
        if settings.replicas.are_set:
            self._share(settings.replicas, keys)
        self._reviewing: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._may_save = settings.state is not None  # False if the file is not written, such as a later release's
        self.unsaved = ""

    def _share(self, replicas: ReplicaSettings, keys: KeyRing | None) -> None:
        index = self._index if isinstance(self._index, SharedPrefixIndex) else None
        self._sharing = state = ReplicaState(
            os.urandom(SENDER_BYTES), index, silent_s=replicas.silent_s, now_s=time.monotonic()
        )
        if replicas.redis:
            stream = StreamSettings(interval_s=replicas.every_s)
            self._replicas = RedisReplicas(index, replicas.redis, self._kind, keys=keys, settings=stream, state=state)
        if replicas.listen or replicas.peers:
            self._peers = PeerExchange(
                state, self._kind, replicas.listen, replicas.peers, keys=keys, every_s=replicas.every_s
            )

    def connect(self, pickers: Iterable[Picker]) -> None:
        """Share the requests of these pickers with replicas, if there are any."""
        if self._sharing is not None:
            self._sharing.connect(list(pickers))

    async def start(self) -> None:
        """Load the file, and connect. The fleet must be known."""
        if self._settings.state is not None and isinstance(self._index, ApproximatePrefixIndex):
            try:
                blocks = load_index(self._settings.state, self._index, self._kind, self._slots())
                log.info("prefix index: %d blocks loaded from %s", blocks, self._settings.state)
            except LaterFile as error:
                self.unsaved = f"the prefix index is not saved: {error}, and the file is not overwritten"
                self._may_save = False
                log.warning("the prefix index starts empty: %s", self.unsaved)
            except InvalidInput as error:
                log.warning("the prefix index starts empty: %s", error)
            self._saving = asyncio.create_task(self._save_periodically())
        if self._sharing is not None:
            self._reviewing = asyncio.create_task(self._review(self._sharing), name="replicas")
        if self._peers is not None:
            await self._peers.start()
        if self._replicas is not None:
            await self._replicas.start()

    async def _review(self, sharing: ReplicaState) -> None:
        """Drop what other replicas sent long ago, and log who falls silent or is heard again."""
        known: set[str] = set()
        while True:
            now_s = time.monotonic()
            try:
                sharing.review(now_s)
            except Exception:  # what is too old must not stay for good
                log.exception("requests of other routers")
            heard = sharing.heard()
            for replica in sorted(heard - known):
                log.info("replicas: router %s is heard", replica)
            for replica in sorted(known - heard):
                log.warning("replicas: router %s is heard no more", replica)
            known = heard
            await asyncio.sleep(REVIEW_S)

    @property
    def sharing(self) -> ReplicaState | None:
        return self._sharing

    @property
    def peers(self) -> PeerExchange | None:
        return self._peers

    def replicas(self) -> ReplicaStatus | None:
        return None if self._replicas is None else self._replicas.status

    async def close(self, keep: bool = True) -> None:
        if self._replicas is not None:
            await self._replicas.close()
        if self._peers is not None:
            await self._peers.close()
        await cancel([self._saving, self._reviewing])
        if keep and (written := await self._save()):
            log.info("prefix index saved to %s: %d bytes", self._settings.state, written)

    def troubles(self) -> list[str]:
        troubles = [self.unsaved] if self.unsaved else []
        status = self.replicas()
        if status is not None and status.degraded:
            troubles.append(f"the prefix index is not shared with other routers ({status.kind}): {status.degraded}")
        if self._peers is not None and self._peers.refused:
            troubles.append(f"replicas: a router was refused: {self._peers.refused}")
        if self._sharing is not None:
            troubles += self._sharing.troubles(time.monotonic())
        return troubles

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _save(self) -> int:
        index, path = self._index, self._settings.state
        if path is None or not self._may_save or not isinstance(index, ApproximatePrefixIndex):
            return 0
        blocks_by_server = {}
        for name, slot in self._slots().items():
            blocks_by_server[name] = Held(index.capacity_of(slot), index.dump(slot))
            await asyncio.sleep(0)  # one server at a time: a dump takes milliseconds
        try:
            written = await asyncio.to_thread(write_snapshot, path, Snapshot(self._kind, blocks_by_server))
        except InvalidInput as error:
            if not self.unsaved:
                log.error("%s", error)
            self.unsaved = str(error)
            return 0
        self.unsaved = ""
        return written

    def _slots(self) -> dict[str, int]:
        return {server.name: server.slot for server in self._fleet}

    def _create_scorer(self, settings: Settings) -> Scorer:
        """Create the strategy with its index: shared, learnt from requests, or of KV events."""
        name, options, shares = settings.strategy or DEFAULT, strategy_options(settings), settings.replicas.are_set
        if settings.cost is not None and name != DEFAULT and not settings.splits:
            raise InvalidInput(f"cost: strategy {name!r} does not estimate seconds; {DEFAULT!r} does")
        cost = None if settings.cost is None or name != DEFAULT else read_cost(settings.cost)
        known = STRATEGIES.options_of(name) if name in STRATEGIES else {}
        learns = "blocks_per_server" in known and not options.get("events")
        # Clients choose prompts, and so block hashes. The secret prevents them from making their entries of the table
        # collide.
        secret = int.from_bytes(os.urandom(8), "little") | 1
        if not learns:
            scorer = named(name, cost=cost, **options)
            check_events(settings, scorer)
            if event_index(scorer) is None:
                return scorer
            own = PreciseIndex(int(options["block_tokens"]), secret=secret)
            return named(name, index=own, cost=cost, **options)
        named(name, **options)  # check the options before their values are used
        tuned: Any = STRATEGIES.settings(name, options)
        blocks, most = tuned.blocks_per_server, getattr(tuned, "most_blocks", None)
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
    """Name how prompts are cut into blocks: only hashes of equal kinds compare."""
    prompts = settings.prompts
    if prompts.tokenizer is None:
        return f"bytes-{prompts.block_bytes}"
    file = prompts.tokenizer / "tokenizer.json" if prompts.tokenizer.is_dir() else prompts.tokenizer
    try:
        digest = hashlib.sha256(read_bounded(file, MAX_TOKENIZER_BYTES)).hexdigest()[:16]
    except OSError as error:
        raise InvalidInput(f"no tokenizer at {file}: {os_reason(error)}") from None
    return f"tokens-{prompts.block_tokens}-{digest}"


class ReplicaFigures(Collector):
    def __init__(self, prefix_state: PrefixState) -> None:
        self._prefix_state = prefix_state

    def collect(self) -> Iterator[Metric]:
        if self._prefix_state.sharing is not None:
            yield from self._of_requests(self._prefix_state.sharing)
        status = self._prefix_state.replicas()
        if status is None:
            return
        degraded, name = "1: the prefix index is not shared", "skymemory_router_replicas_degraded"
        yield family(GaugeMetricFamily, name, degraded, ("kind",), [((status.kind,), bool(status.degraded))])
        text, name = "Updates of the shared prefix index, by outcome", "skymemory_router_replica_deltas"
        rows = (((outcome,), getattr(status, outcome)) for outcome in ("sent", "received", "lost", "refused"))
        yield family(CounterMetricFamily, name, text, ("outcome",), rows)

    def _of_requests(self, sharing: ReplicaState) -> Iterator[Metric]:
        silences = sharing.silences_s(time.monotonic())
        text = "Other routers that are heard"
        yield GaugeMetricFamily("skymemory_router_replicas_heard", text, value=len(sharing.heard()))
        text, name = "Since another router was heard", "skymemory_router_replica_silence_seconds"
        yield family(
            GaugeMetricFamily, name, text, ("replica",), (((one,), silent_s) for one, silent_s in silences.items())
        )
        text = "Requests of other routers that this router counts"
        yield GaugeMetricFamily("skymemory_router_replica_requests", text, value=len(sharing.elsewhere))
        counts = sharing.counts
        text, name = "Messages between routers, by outcome", "skymemory_router_replica_messages"
        outcomes = {
            "sent": counts.sent,
            "received": counts.received,
            "refused": counts.refused,
            "missed": sharing.elsewhere.gaps,
            "snapshots": counts.snapshots,
        }
        rows = (((outcome,), count) for outcome, count in outcomes.items())
        yield family(CounterMetricFamily, name, text, ("outcome",), rows)


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """Write a snapshot; return its bytes.

    Raises:
        InvalidInput: not written; a previous file is unchanged.
    """
    data = pack_snapshot(snapshot)
    try:
        write_private(path, data, durable=True)
    except OSError as error:
        raise InvalidInput(f"the prefix index cannot be saved to {path}: {os_reason(error)}") from None
    return len(data)


def load_index(path: Path, index: ApproximatePrefixIndex, kind: str, slots: Mapping[str, int]) -> int:
    """Load the file's blocks of ``slots``; return their number.

    Raises:
        InvalidInput: unreadable, damaged, or of another version or kind; the index is empty.
    """
    try:
        data = read_bounded(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise InvalidInput(f"the prefix index in {path} cannot be read: {os_reason(error)}") from None
    try:
        return restore(index, unpack_snapshot(data), kind, slots)
    except InvalidInput as error:
        raise type(error)(f"{path}: {error}") from None
