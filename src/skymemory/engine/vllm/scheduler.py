"""The connector in vLLM's scheduler: it decides which blocks of a request are loaded and saved.

The life of a request: ``matched`` (how many tokens the store has; asked until scheduled), ``allocated`` (its blocks are
reserved: the load is planned), ``plan`` (with each step: loads, and saves of completed values), ``update`` (reports of
the workers), ``finished``.

With Cake (a lone request of several steps) ``matched`` announces nothing: the request computes from its front while the
back is loaded. For a request that another engine prefills (``transfer_params``), ``matched`` announces all that will be
stored, and the workers load each value once it is stored.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skymemory.cache.blocks import BlockLookup, Part, Parts
from skymemory.cache.patience import Latencies, patience_s, recompute_cost
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.engine.vllm.announcements import Announcements
from skymemory.engine.vllm.plan import (
    Loaded,
    LoadRequest,
    Piece,
    Save,
    Shape,
    StepPlan,
    WorkerOutcome,
    part_key,
    rank_key,
)
from skymemory.engine.vllm.transfer_params import TransferParams, answer_of
from skymemory.errors import InvalidInput
from skymemory.kv.block import hash_blocks
from skymemory.reasons import Miss

_log = logging.getLogger(__name__)

_ANSWERED_S = 0.002  # wait of the scheduler for a lookup; a local store answers within it
_PATIENCE_S = 0.5  # wait for a lookup while the compute speed is unknown
_FRESH_S = 1.0  # validity of an answer
_KEPT_SENT = 1 << 17
_KEPT_GENERATIONS = 1 << 12
_FULL = 0.75  # share of a full step's tokens: smaller steps say little about its time
_KEPT_LOADS = 0.75  # weight of earlier loads
# Minimum spread of load sizes, as a share of their mean, to estimate the fixed part of a load's time; and minimum
# slope, as a share of the mean.
_SPREAD, _LEAST_SLOPE = 0.2, 0.1
_STALLED_S = 30.0  # time after which a stopping engine no longer waits for saves
_MEANWHILE, _ALL_THE_SAME, _ENDED = "computed meanwhile", "computed all the same", "the request ended"
_RESET, _PREEMPTED = "the cache was reset", "the request was preempted"  # reasons of unused tokens
BlockTables = Sequence[Sequence[Sequence[int]]]
"""Block numbers of a request in token order, by part and group."""
_NULL_BLOCK = 0  # block number for blocks outside a window
_GREETING = [hashlib.sha256(b"greeting %d" % number).digest() for number in range(16)]
_NO_PARAMS = TransferParams()
_OPTIMISM = 0.98  # factor per prompt computed as loading seemed slower: a recovered link is tried again


class SeedsOfRequests(Protocol):
    """Interface of ``identity.Seeds``."""

    @property
    def generation(self) -> str: ...

    def of(self, request: Any, generation: str = "") -> bytes | None:
        """Return the digest of a request's context; None: neither loaded nor saved."""

    def has_stale_blocks(self, request: Any) -> bool: ...

    def reset(self) -> None: ...


class CakeDoor(Protocol):
    """Functions of vLLM's scheduler for Cake."""

    @property
    def step_tokens(self) -> int: ...

    def reserve(self, request: Any, computed_tokens: int) -> bool:
        """Give the request all blocks of its prompt; False if there are too few."""

    def go_on_from(self, request: Any, tokens: int) -> None:
        """Let the next step begin after ``tokens`` tokens, all in place."""


@dataclass(slots=True)
class Lookup:
    """Question to the store, in a thread, how many of a prompt's values it has."""

    first: int
    """Leading values that vLLM has and that are not looked up."""
    asked_s: float
    call: WorkerCall[object]
    latencies: Latencies
    found: int | None = None
    """Answer; None: not yet."""

    def answered_late(self, result: object) -> None:
        """Record an abandoned lookup: later waits for the store are longer."""
        self.latencies.record(time.monotonic() - self.asked_s)


@dataclass(slots=True)
class Backward:
    """Cake: values loaded from the back of a request computed from its front."""

    end_tokens: int
    running: bool = False
    lowest_tokens: int | None = None


@dataclass(slots=True)
class Known:
    request: Any
    seed: bytes
    content: dict[int, bytes]
    """Digests of media by the position of their first placeholder."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of its complete values."""
    settled: int = 0
    """Number of leading values that need no saving."""
    lookup: Lookup | None = None
    computed_tokens: int = 0
    """Tokens in vLLM's cache when the load was decided."""
    backward: Backward | None = None
    ahead_bytes: int = 0
    """Bytes of loads that were running when its own began."""
    failed: bool = False
    """True after a failed load: the request is computed, or a store that loses values would be asked forever."""
    params: TransferParams = _NO_PARAMS
    waits_s: float = 0.0
    """Longest wait for each value that another engine stores; 0: none."""
    waited: bool = False
    gave_up: bool = False
    missing_tokens: int = 0
    """Missing tokens of its last load, on the worst rank: ranks end in different steps."""
    loading: range | None = None
    """Tokens of its last load, until it is scheduled after them."""
    checked: bool = False
    """True if the values that the store lacks are known, for a handover."""
    unsaved: int | None = None
    """First value that could not be saved, for a handover."""
    is_apart: bool = False
    """True if its keys name other weights than its blocks': it loads and saves nothing."""
    is_own: bool = True
    """True if its keys name this engine's weights."""


class SchedulerSide:
    """Connector in the scheduler. Not thread-safe: vLLM's scheduler is a single thread."""

    def __init__(
        self,
        parts: Parts,
        shape: Shape,
        seeds: SeedsOfRequests,
        block_ids: Callable[[str], BlockTables],
        *,
        cake: CakeDoor | None = None,
        announcements: Announcements | None = None,
        ranks: int = 1,
        loads: bool = True,
        saves: bool = True,
        wait_s: float = 5.0,
        kind_of_store: Callable[[], str] = lambda: "",
        has_states: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wait_s``: for each next value of another engine's prefill (0: look it up). ``kind_of_store``: called in a
        thread. ``has_states``: recurrent states exist at the ends of some blocks only.
        """
        self._parts = parts
        self._compute = parts.first.compute
        self._shape = shape
        self._seeds = seeds
        self._named: dict[str, None] = {}
        self._is_stale = False  # true if vLLM's cache has blocks from before the last reset
        self._past: dict[str, None] = {}
        self._block_ids = block_ids
        self._cake = cake
        self._announcements = announcements
        self._ending: list[str] = []
        self._is_writing = False
        self._step_s = 0.0
        self._ranks = ranks
        self._loads, self._saves = loads, saves
        self._wait_s = 0.0 if has_states else wait_s  # no state is stored after the last block of such a prompt
        self._has_states = has_states
        self._waiting_since_s: dict[str, float] = {}
        self._clock = clock
        self._has_warned = False
        self._known: dict[str, Known] = {}
        self._planned: list[LoadRequest] = []
        self._sent: OrderedDict[bytes, None] = OrderedDict()
        self._lookups = TierWorkers("vllm lookup", 2)
        self._latencies = Latencies()
        self._loading = LoadRate()
        self._gave_up_s = math.inf
        self._under_way: dict[str, int] = {}  # bytes of running loads, by request: later loads share the link
        self._counts: Counter[str] = Counter()
        self._saving, self._saved_s = 0, clock()  # number of values that the workers hold, and time of its last change
        self.store_kind = ""
        self._lookups.submit(WorkerCall(lambda: self._greet(kind_of_store)))

    def _greet(self, kind_of_store: Callable[[], str]) -> None:
        """Connect, and time a lookup: else the first request would give up a distant store."""
        for number in range(3):
            started_s = self._clock()
            self._parts.first.prefix(list(_GREETING))
            if number:
                self._latencies.record(self._clock() - started_s)
        self.store_kind = kind_of_store()

    @property
    def saving(self) -> bool:
        return self._saving > 0 and self._clock() < self._saved_s + _STALLED_S

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens loadable after ``computed_tokens`` (None: ask again), and True if asynchronously."""
        # Loads are always asynchronous: if a load that a step waits for fails, vLLM 0.32 leaves its blocks in the
        # prefix cache.
        known = self._of(request)
        if known is None or known.is_apart:
            return 0, False
        # vLLM asks about a request without blocks. It may ask about a preempted request before the plan reports it.
        self._end_backward(known, _PREEMPTED)
        if computed_tokens and (self._is_stale or self._seeds.has_stale_blocks(request)):
            known.is_apart = True
            return 0, False
        if known.params.hands_over and self._saves and not self._check(known):
            return None, False
        # vLLM drops what is announced for a request that must not read a cache, but Cake announces nothing.
        if known.failed or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        shape = self._shape
        if self._has_states and computed_tokens % shape.block_tokens:
            return 0, False  # vLLM goes on within a block
        limit = (request.num_tokens - 1) // shape.block_tokens * shape.block_tokens
        first = computed_tokens // shape.value_tokens
        wanted = min(-(-limit // shape.value_tokens), len(known.keys))
        if limit <= computed_tokens or first >= wanted:
            return 0, False
        if known.waits_s:
            prompt_tokens = len(request.prompt_token_ids)
            promised = prompt_tokens if known.params.tokens is None else min(known.params.tokens, prompt_tokens)
            complete_tokens = promised // shape.value_tokens * shape.value_tokens
            known.computed_tokens = computed_tokens
            tokens = min(complete_tokens, limit) - computed_tokens
            return (tokens, True) if tokens > 0 else (0, False)
        found_values = self._find_prefix(known, first, wanted, limit)
        if found_values is None:
            return None, False
        self._forget(known.keys[found_values:wanted])
        tokens = min(found_values * shape.value_tokens, limit) - computed_tokens
        if tokens <= 0:
            return 0, False
        known.computed_tokens, known.backward = computed_tokens, None
        load_bytes = self._load_bytes(computed_tokens, computed_tokens + tokens)
        load_s = self._loading.seconds(load_bytes + sum(self._under_way.values()))
        compute_s = self._compute.seconds(tokens)
        if self._is_for_cake(tokens, load_s):
            known.backward = Backward(computed_tokens + tokens)
            return 0, False
        if load_s is not None and compute_s is not None and load_s > compute_s:
            self._loading.passed_over()
            self._counts["slower_than_computing_tokens"] += tokens
            return 0, False
        return tokens, True

    def _check(self, known: Known) -> bool:
        """Return True if it is known what the store lacks of a prompt to hand over, which is saved again."""
        if not known.checked and known.keys:
            wanted = len(known.keys)
            found_values = self._find_prefix(known, 0, wanted, wanted * self._shape.value_tokens)
            if found_values is None:
                return False
            self._forget(known.keys)  # for a window, values outside it are not known to be stored
            for key in known.keys[:found_values]:
                self._sent[key] = None
        known.checked = True
        return True

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            for number in range(len(self._parts.parts)):
                self._sent.pop(part_key(key, number), None)

    def _needed(self, part: Part, start: int, end: int) -> range:
        in_sight = 0 if part.window is None else max(0, end - part.window + 1)
        block = self._shape.block_tokens
        return range(max(start, in_sight) // block, end // block)

    def _values_of(self, blocks: range) -> range:
        size = self._shape.blocks_per_value
        return range(blocks.start // size, -(-blocks.stop // size))

    def _load_bytes(self, start: int, end: int) -> int:
        return sum(
            len(self._values_of(self._needed(part, start, end))) * part.blocks.layout.block_bytes
            for part in self._parts.parts
        )

    def _is_for_cake(self, tokens: int, load_s: float | None) -> bool:
        """Return True if no other request could compute meanwhile, and neither side ends within a step or two."""
        if self._cake is None or len(self._known) > 1 or tokens < 2 * self._cake.step_tokens:
            return False
        return load_s is None or load_s > self._step_s

    def allocated(self, request: Any, external_tokens: int) -> None:
        """Plan the load of a request whose blocks vLLM has reserved."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        backward = known.backward
        if backward is not None:
            assert self._cake is not None
            if not self._cake.reserve(request, known.computed_tokens):
                known.backward = None
                return
            backward.running, external_tokens = True, backward.end_tokens - known.computed_tokens
        if not external_tokens:
            return
        start, end = known.computed_tokens, known.computed_tokens + external_tokens
        pieces = self._pieces(known, start, end)
        self._planned.append(
            LoadRequest(request.request_id, pieces, external_tokens, backward is not None, known.waits_s)
        )
        if known.waits_s:
            known.waits_s, known.waited = 0.0, True
            self._waiting_since_s[request.request_id] = self._clock()
            self._counts["waited_loads"] += 1
        else:
            known.ahead_bytes = sum(self._under_way.values())
            self._under_way[request.request_id] = self._load_bytes(start, end)
        known.missing_tokens = 0
        if backward is None:
            known.loading = range(start, end)
        known.settled = max(known.settled, -(-end // self._shape.value_tokens))
        known.lookup = None
        self._counts["loads"] += 1
        self._counts["requested_tokens"] += external_tokens

    def _pieces(self, known: Known, start: int, end: int) -> tuple[Piece, ...]:
        # Return keys and destinations of the values with tokens ``start`` to ``end``, by part.
        tables = self._block_ids(known.request.request_id)
        pieces = []
        for number, part in enumerate(self._parts.parts):
            blocks = self._needed(part, start, end)
            values = self._values_of(blocks)
            keys = tuple(part_key(key, number) for key in known.keys[values.start : values.stop])
            where = tuple(tuple(table[blocks.start : blocks.stop]) for table in tables[number])
            skipped = blocks.start - values.start * self._shape.blocks_per_value
            pieces.append(Piece(number, keys, values.start, skipped, where, blocks.start))
        return tuple(piece for piece in pieces if piece.keys)

    def plan(self, output: Any) -> StepPlan:
        """Return the loads and saves of this step, the progress of computing (``fences``), and loads to end."""
        plan, self._planned = StepPlan(self._planned, tokens=output.total_num_scheduled_tokens), []
        plan.loads = [load for load in plan.loads if not load.backward or self._begins(load, output)]
        started = {load.request for load in plan.loads if load.backward}
        for request_id in output.preempted_req_ids or ():
            if request_id not in started and (known := self._known.get(request_id)) is not None:
                self._end_backward(known, _PREEMPTED)
        plan.ends, self._ending, self._is_writing = self._ending, [], False
        for request_id, tokens in output.num_scheduled_tokens.items():
            known = self._known.get(request_id)
            if known is not None and known.loading is not None:
                self._settle(known, known.request.num_computed_tokens)
            if known is not None and known.backward is not None:
                computed = known.request.num_computed_tokens + tokens
                plan.fences[request_id] = -(-computed // self._shape.block_tokens)
        if self._saves:
            for request_id, tokens in output.num_scheduled_tokens.items():
                if (known := self._known.get(request_id)) is not None and not known.is_apart:
                    plan.saves += self._completed(known, tokens)
        return plan

    def _begins(self, load: LoadRequest, output: Any) -> bool:
        """Return True if the request is computed from the expected token: another connector may have loaded blocks."""
        known = self._known.get(load.request)
        if known is None or known.backward is None:
            return False
        if load.request in output.num_scheduled_tokens and known.request.num_computed_tokens == known.computed_tokens:
            return True
        known.backward = None
        return False

    def _completed(self, known: Known, tokens: int) -> list[Save]:
        # Return the saves of values that this step's ``tokens`` complete.
        request, size = known.request, self._shape.blocks_per_value
        complete_values = min(request.num_computed_tokens + tokens, request.num_tokens) // self._shape.value_tokens
        if complete_values <= known.settled:
            return []
        if request.lora_request is not None and self._seed_of(known.request, known.params) != known.seed:
            known.is_apart = True  # its adapter was reloaded meanwhile, from other files
            return []
        self._extend(known)
        tables, saves = self._block_ids(request.request_id), []
        for depth in range(known.settled, complete_values):
            for number in reversed(range(len(tables))):  # the first part last: lookups begin with it
                key = part_key(known.keys[depth], number)
                blocks = tuple(tuple(table[depth * size : (depth + 1) * size]) for table in tables[number])
                if key not in self._sent and not any(_NULL_BLOCK in some for some in blocks):
                    self._sent[key] = None
                    parent = part_key(known.keys[depth - 1], number) if depth else None
                    saves.append(Save(number, key, depth, parent, blocks))
                    if self._announcements is not None and number == 0 and known.is_own:
                        self._announcements.saving(key, self._names(request, depth))
        while len(self._sent) > _KEPT_SENT:
            self._sent.popitem(last=False)
        known.settled = complete_values
        return saves

    def update(self, outcome: WorkerOutcome) -> None:
        if outcome.step_tokens:
            self._compute.record(outcome.step_tokens, outcome.step_s)
            if self._cake is not None and outcome.step_tokens >= _FULL * self._cake.step_tokens:
                self._step_s += (outcome.step_s - self._step_s) / 4 if self._step_s else outcome.step_s
        if outcome.saving != self._saving:
            self._saving, self._saved_s = outcome.saving, self._clock()
        for size_bytes, seconds in outcome.read_back:
            self._loading.record(size_bytes, seconds)
        if self._announcements is not None:
            self._announcements.saved(outcome.saved)
            self._announcements.unsaved(outcome.unsaved)
        if outcome.unsaved:
            self._note_unsaved(outcome.unsaved)
        for request_id, loaded in outcome.loaded.items():
            known = self._known.get(request_id)
            if loaded.waited:
                self._end_waiting(request_id)
                if known is not None and loaded.reason is Miss.NOT_IN_TIME and not known.gave_up:
                    known.gave_up = True
                    self._counts["waits_given_up"] += 1
            else:
                self._under_way.pop(request_id, None)
                # Loads that were running before took the same time; a load that brought nothing says nothing.
                ahead_bytes = known.ahead_bytes if known is not None and loaded.size_bytes else 0
                if not self._stood_still(loaded):
                    self._loading.record(loaded.size_bytes + ahead_bytes, loaded.seconds)
            if loaded.reason and loaded.reason is not Miss.ABORTED:
                self._counts[f"failed_loads {loaded.reason}"] += 1
                counted_tokens = known.missing_tokens if known is not None else 0
                self._counts["recomputed_tokens"] += max(0, loaded.missing_tokens - counted_tokens)
                if known is not None:
                    known.missing_tokens = max(known.missing_tokens, loaded.missing_tokens)
                    known.failed = True
                    self._unsettle(known, loaded.lost)
        for request_id, known in self._known.items():
            if known.backward is not None and known.backward.running:
                # If a rank has placed nothing yet, ``lowest`` has no entry.
                block = outcome.lowest.get(request_id)
                known.backward.lowest_tokens = None if block is None else block * self._shape.block_tokens
                self._meet(known, known.backward)
        self._counts.update({name: int(count) for name, count in outcome.counts.items()})

    def _stood_still(self, loaded: Loaded) -> bool:
        """Return True if the store stopped answering, so that a load measures no speed: the first after a success, and
        loads concurrent with it.
        """
        if loaded.reason is not Miss.DEADLINE:
            self._gave_up_s = math.inf if not loaded.reason else self._gave_up_s
            return False
        if self._loading.seconds(0) is None:
            return False
        now_s = self._clock()
        if now_s - loaded.seconds <= self._gave_up_s:
            self._gave_up_s = min(self._gave_up_s, now_s)
            return True
        self._loading = LoadRate()  # earlier measurements no longer apply
        return False

    def _note_unsaved(self, keys: Sequence[bytes]) -> None:
        # Forget values that were not saved, so that they are saved again; a handover ends before them.
        unsaved = frozenset(keys)
        for key in unsaved:
            self._sent.pop(key, None)
        for known in self._known.values():
            if known.params.hands_over:
                numbers = range(len(self._parts.parts))
                depths = [
                    depth
                    for depth, key in enumerate(known.keys[: known.settled])
                    if any(part_key(key, number) in unsaved for number in numbers)
                ]
                known.unsaved = min([*depths, *([] if known.unsaved is None else [known.unsaved])], default=None)

    def _end_waiting(self, request_id: str) -> None:
        since_s = self._waiting_since_s.pop(request_id, None)
        if since_s is not None:
            self._counts["waiting_ms"] += round((self._clock() - since_s) * 1000)

    def _unsettle(self, known: Known, depth: int) -> None:
        self._forget(known.keys[depth : known.settled])
        known.settled = min(known.settled, depth)

    def _meet(self, known: Known, backward: Backward) -> None:
        # End Cake's load when computing has met it: the request continues after the loaded tokens.
        assert self._cake is not None
        computed = known.request.num_computed_tokens
        if computed >= backward.end_tokens:
            self._end_backward(known, _MEANWHILE)  # computing was faster
        elif backward.lowest_tokens is not None and computed >= backward.lowest_tokens:
            self._cake.go_on_from(known.request, backward.end_tokens)
            self._counts["cake_tokens"] += backward.end_tokens - computed
            self._announce(known, computed, backward.end_tokens)
            self._end_backward(known, _MEANWHILE, backward.end_tokens - computed)

    def _end_backward(self, known: Known, reason: str, used: int = 0) -> None:
        # Notify the workers to end Cake's load; count its tokens.
        backward, known.backward = known.backward, None
        if backward is None or not backward.running:
            return
        self._ending.append(known.request.request_id)
        self._is_writing = True
        if backward.lowest_tokens is not None:
            self._count_loaded(backward.end_tokens - backward.lowest_tokens, used, reason)

    def _settle(self, known: Known, computed_tokens: int, reason: str = _ALL_THE_SAME) -> None:
        # Count how many tokens of its last load a request did not compute.
        loading, known.loading = known.loading, None
        if loading is None:
            return
        loaded = len(loading) - known.missing_tokens
        used = max(0, min(computed_tokens, loading.stop) - loading.start)
        self._count_loaded(loaded, min(used, loaded), reason)
        self._announce(known, loading.start, loading.start + min(used, loaded))
        if used < loaded and reason == _ALL_THE_SAME and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "vLLM computes %d of %d tokens of request %s again, though they were loaded; further cases are only "
                "counted (unused_tokens)",
                loaded - used,
                loaded,
                known.request.request_id,
            )

    def _announce(self, known: Known, start: int, end: int) -> None:
        if self._announcements is not None and known.is_own:
            for depth in range(-(-start // self._shape.value_tokens), end // self._shape.value_tokens):
                self._announcements.loaded(known.keys[depth], self._names(known.request, depth))

    def _names(self, request: Any, depth: int) -> Sequence[bytes]:
        if len(request.block_hashes) > request.num_tokens // self._shape.block_tokens:
            return ()
        size = self._shape.blocks_per_value
        return [bytes(name) for name in request.block_hashes[depth * size : (depth + 1) * size]]

    def _count_loaded(self, loaded: int, used: int, reason: str) -> None:
        self._counts["loaded_tokens"] += loaded
        self._counts["used_tokens"] += used
        if loaded > used:
            self._counts[f"unused_tokens {reason}"] += loaded - used

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget the request. Returns its answer's ``kv_transfer_params`` for a handover."""
        is_loading = request.request_id in self._under_way or request.request_id in self._waiting_since_s
        self._under_way.pop(request.request_id, None)
        if (known := self._known.pop(request.request_id, None)) is None:
            return None
        if not is_loading:
            self._settle(known, 0, _ENDED)
        self._end_backward(known, _ENDED)
        if known.waited:
            # vLLM keeps its blocks until the workers report that they write no more.
            self._ending.append(request.request_id)
            self._end_waiting(request.request_id)
        if not known.params.hands_over or not self._saves:
            return None
        values = min(known.settled, len(request.prompt_token_ids) // self._shape.value_tokens)
        values = values if known.unsaved is None else min(values, known.unsaved)
        values = 0 if known.is_apart else values
        return answer_of(values * self._shape.value_tokens, self._seeds.generation)

    def reset(self, is_empty: bool = True) -> bool:
        """Reset when the weights may have changed. Requests that hold older blocks, or find some in vLLM's cache unless
        ``is_empty``, load and save nothing. Returns False while an older block is being written.
        """
        self._seeds.reset()
        self._is_stale = not is_empty
        self._past |= self._named
        self._named.clear()
        while len(self._past) > _KEPT_GENERATIONS:
            del self._past[next(iter(self._past))]
        self._planned = [load for load in self._planned if not load.backward]
        backward = {name for name, known in self._known.items() if known.backward is not None}
        loading = self._waiting_since_s.keys() | self._under_way.keys() - backward
        for name, known in list(self._known.items()):
            self._end_backward(known, _RESET)
            self._settle(known, 0, _RESET)
            if known.request.num_computed_tokens or name in loading:
                known.is_apart, known.lookup = True, None
            else:
                del self._known[name]  # vLLM asks about it again
        self._sent.clear()
        if self._announcements is not None:
            self._announcements.clear()
        return not any(name in loading for name in self._known) and not self._is_writing

    def counts(self) -> dict[str, int]:
        counts, self._counts = dict(self._counts), Counter()
        return counts

    def close(self) -> None:
        self._lookups.close()

    def new(self, request: Any) -> None:
        self._of(request)

    def _of(self, request: Any) -> Known | None:
        # Return the request's state, made at its first call; None: neither loaded nor saved.
        known = self._known.get(request.request_id)
        if known is None:
            params = _params_of(request)
            generation = self._named_by(params)
            if (seed := self._seeds.of(request, generation)) is None:
                return None
            is_own = generation in ("", self._seeds.generation)
            known = self._known[request.request_id] = Known(
                request, seed, _content_of(request), params=params, is_own=is_own
            )
            # After a reset of this engine, only values of a named generation can be stored by another.
            if params.takes_over and self._loads and (generation or not self._seeds.generation):
                known.waits_s = min(self._wait_s, params.wait_s)
        self._extend(known)
        return known

    def _seed_of(self, request: Any, params: TransferParams) -> bytes | None:
        return self._seeds.of(request, self._named_by(params))

    def _named_by(self, params: TransferParams) -> str:
        # Return the weights' generation that a request to take over names; empty if it is out of date.
        generation = params.generation
        if not (params.takes_over and generation) or generation in self._past:
            return ""
        if len(self._named) < _KEPT_GENERATIONS:
            self._named[generation] = None
        return generation if generation in self._named else ""

    def _extend(self, known: Known) -> None:
        # Add the keys of values that new tokens complete.
        size, have = self._shape.value_tokens, len(known.keys)
        if known.request.num_tokens // size > have:
            before = known.keys[-1] if have else known.seed
            count = known.request.num_tokens // size
            tokens = known.request.all_token_ids[have * size : count * size]
            content = {
                at - have * size: digest for at, digest in known.content.items() if have * size <= at < count * size
            }
            known.keys += hash_blocks(before, tokens, size, content)

    def _find_prefix(self, known: Known, first: int, wanted: int, limit_tokens: int) -> int | None:
        """Return how many of the first ``wanted`` values a request can have, given the first ``first``; None: no answer
        yet.
        """
        # In a thread: a store that hangs must not block the scheduler.
        now_s = self._clock()
        lookup = known.lookup
        if lookup is None or lookup.first != first or (lookup.found is not None and now_s > lookup.asked_s + _FRESH_S):
            keys = known.keys[:wanted]
            call: WorkerCall[object] = WorkerCall(lambda: self._prefix(keys, first, limit_tokens))
            lookup = known.lookup = Lookup(first, now_s, call, self._latencies)
            self._counts["lookups"] += 1
            if self._lookups.all_hung or not self._lookups.submit(lookup.call):
                lookup.found = first
        if lookup.found is None and lookup.call.wait(_ANSWERED_S):
            if (error := lookup.call.error) is None:
                lookup.found = int(str(lookup.call.result))
                if self._announcements is not None:
                    self._announcements.lost(known.keys[max(first, lookup.found) : wanted])
                self._latencies.record(now_s - lookup.asked_s)
            else:  # vLLM goes on
                _log.error("a lookup failed by a fault of the connector", exc_info=error)
                self._counts["lookups_failed"] += 1
                lookup.found = first
        if lookup.found is None:
            with recompute_cost(self._compute.seconds((wanted - first) * self._shape.value_tokens)):
                patience = min(_PATIENCE_S, patience_s(self._latencies))
            overdue = now_s > lookup.asked_s + patience
            # Time that the lookup's thread waits for a processor is this machine's load, not the store's latency.
            overdue = overdue and now_s > lookup.asked_s + patience + min(lookup.call.starved_s, _PATIENCE_S)
            if overdue and lookup.call.give_up(lookup.answered_late):
                self._counts["lookups_given_up"] += 1
                lookup.found = first
        return min(lookup.found, wanted) if lookup.found is not None else None

    def _prefix(self, keys: list[bytes], first: int, limit_tokens: int) -> int:
        parts, chains = [], []
        for number, part in enumerate(self._parts.parts):
            for rank in range(self._ranks):
                parts.append(part)
                chains.append([rank_key(part_key(key, number), rank) for key in keys])
        return BlockLookup(parts, chains, limit_tokens, first).find_prefix(len(keys))


def _content_of(request: Any) -> dict[int, bytes]:
    """Return media digests by position, which a film and its sound may share."""
    content: dict[int, bytes] = {}
    for feature in request.mm_features:
        digest, before = hashlib.sha256(feature.identifier.encode()).digest(), content.get(feature.mm_position.offset)
        content[feature.mm_position.offset] = digest if before is None else hashlib.sha256(before + digest).digest()
    return content


def _params_of(request: Any) -> TransferParams:
    try:
        return TransferParams.read(getattr(request, "kv_transfer_params", None))
    except InvalidInput as error:
        _log.warning("request %s is answered as if it had no kv_transfer_params: %s", request.request_id, error)
        return _NO_PARAMS


class LoadRate:
    """Estimate of load times, a fixed part and a part by bytes; later loads weigh more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._passed_over = 0

    def record(self, size_bytes: int, seconds: float) -> None:
        # Sums for a linear regression of seconds over bytes, with exponential decay.
        self._passed_over = 0
        if size_bytes and seconds > 0:
            self._weight = self._weight * _KEPT_LOADS + 1
            self._x = self._x * _KEPT_LOADS + size_bytes
            self._y = self._y * _KEPT_LOADS + seconds
            self._xx = self._xx * _KEPT_LOADS + size_bytes * size_bytes
            self._xy = self._xy * _KEPT_LOADS + size_bytes * seconds

    def passed_over(self) -> None:
        self._passed_over += 1

    def seconds(self, size_bytes: int) -> float | None:
        """Estimate the time of a load; None before any."""
        # The estimate is a line through the mean load, with a fixed part if loads of different sizes have shown it.
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        per_byte = mean_y / mean_x  # the slope without a fixed part
        spread = self._xx / self._weight - mean_x * mean_x
        if spread > (_SPREAD * mean_x) ** 2:
            line = (self._xy / self._weight - mean_x * mean_y) / spread
            per_byte *= min(max(line / per_byte, _LEAST_SLOPE), 1.0)  # a slope beyond these limits is noise
        # Prompts passed over lower the estimate, until loading is tried, and so measured, again.
        return (mean_y + (size_bytes - mean_x) * per_byte) * _OPTIMISM**self._passed_over
