"""The connector in a vLLM worker: it loads and saves blocks, as values, concurrently with steps.

Each step: ``begin`` (its loads start), the forward pass, ``end`` (completed values are copied out; a thread stores
them), ``finished``, ``invalid_blocks`` and ``outcome`` (reports).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skymemory.cache.blocks import TIER_FAILURES, LoadTally, Parts, PhaseClock
from skymemory.cache.patience import Latencies, patience_while_computing_s
from skymemory.cache.tiers.workers import TierWorkers, WorkerCall
from skymemory.engine.page_locked import LockedMemory
from skymemory.engine.vllm.copier import Mark, Now, PartCopier
from skymemory.engine.vllm.plan import (
    Loaded,
    LoadRequest,
    Piece,
    Save,
    Shape,
    StepPlan,
    WorkerOutcome,
    rank_key,
)
from skymemory.engine.vllm.rooms import VALUES_TOGETHER, Room, RoomReserver
from skymemory.engine.vllm.waiting import NOT_YET, DelayedCalls, PollInterval
from skymemory.kv.block import Place
from skymemory.kv.value import PAYLOAD_AT, block_header, crc_by_header
from skymemory.pacing import ByteBudget
from skymemory.reasons import Miss
from skymemory.store.base import Presence, StoreTicket

_log = logging.getLogger(__name__)

_THREADS = 4
_WAITING_THREADS = 4
_QUESTION_S = 0.0005  # interpreter time of a question: many waiting loads pause longer
# Limit of a value's load time for a second thread, which fetches while the other copies. On a slower link each would
# wait for the other.
_PAIRED_S = 0.5
_UNKNOWN_S = 10.0
_UNKNOWN_BYTES_PER_S = 1e6  # time and rate that give up a load while the compute speed is unknown
_IDLE_S = 0.002  # wait of a step without computing for a load: else vLLM would spin, and slow the loads
_IDLE_SAVING_S = 0.005  # wait of such a step for saves and waiting loads, as a new request waits for it
_READ_BACK = 4
_WAITING = 1 << 16
_MOST_WRITING = 8  # writes of a load that are kept without a look whether they are done


class _Closed(RuntimeError):
    """Error in a load that was given up: its blocks are another's."""


class _Job:
    """Running load: a sink that writes into the request's blocks, until it is closed."""

    def __init__(
        self,
        load: LoadRequest,
        copiers: Sequence[PartCopier],
        after: Mark,
        blocks_per_value: int,
        began_s: float,
        due_s: float,
    ) -> None:
        """``copiers`` by part; ``after``: until then the blocks may belong to another request."""
        self.load = load
        self._copiers = copiers
        self._after = after
        self._size = blocks_per_value
        self.began_s, self.due_s = began_s, due_s
        self._writing: dict[int, tuple[Mark, memoryview]] = {}
        """Mark of each write that may not be done, and its value, which the device may still read."""
        self._lock = threading.Lock()
        self._closed = False
        self.placed = 0
        self.end: Loaded | None = None

    def place(self, index: int, block: memoryview) -> None:
        with self._lock:
            # Given up, its thread may hang in the store; vLLM gives the blocks to other requests.
            if self._closed:
                raise _Closed("the load was given up")
            self._write(index, block)
            self.placed = index + 1

    def _write(self, index: int, block: memoryview) -> None:
        piece, at = self.load.at(index)
        skipped, blocks = piece.places(at, self._size)
        if any(blocks):
            copier = self._copiers[piece.part]
            if len(self._writing) > _MOST_WRITING:
                self._forget_written()
            self._writing[index] = copier.write(blocks, block, skipped, self._size, self._after), block

    def _forget_written(self) -> None:
        for index in [index for index, (mark, _) in self._writing.items() if mark.done()]:
            del self._writing[index]

    def close(self) -> None:
        """Close the job; on return nothing is written any more."""
        with self._lock:
            self._closed = True
        self.settle()

    def settle(self) -> None:
        with self._lock:
            writing = [mark for mark, _ in self._writing.values()]
        for mark in writing:
            mark.wait()
        with self._lock:
            self._forget_written()

    @property
    def lost(self) -> int:
        """Number of the first value not placed."""
        if self.placed == self.load.values:
            return self.load.pieces[0].first_value + len(self.load.pieces[0].keys)
        piece, at = self.load.at(self.placed)
        return piece.first_value + at

    def missing(self) -> tuple[int, ...]:
        (piece,) = self.load.pieces
        return piece.blocks[0][max(0, self.placed * self._size - piece.skipped_blocks) :]


class _WaitingJob(_Job):
    """Load of values that another engine is storing: it asks until each arrives, at most ``wait_s`` for the next."""

    def __init__(
        self, load: LoadRequest, copiers: Sequence[PartCopier], after: Mark, blocks_per_value: int, began_s: float
    ) -> None:
        super().__init__(load, copiers, after, blocks_per_value, began_s, began_s + load.wait_s)
        self.pace = PollInterval()
        self.size_bytes = 0

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def on_values(self, values: int, size_bytes: int, now_s: float) -> None:
        if values:
            self.size_bytes += size_bytes
            self.due_s = now_s + self.load.wait_s


class _BackwardJob(_Job):
    """Cake's load of a prompt: values from the last down to the fence, by one or two threads."""

    def __init__(
        self,
        load: LoadRequest,
        copiers: Sequence[PartCopier],
        after: Mark,
        blocks_per_value: int,
        began_s: float,
        fence: int,
    ) -> None:
        super().__init__(load, copiers, after, blocks_per_value, began_s, math.inf)
        (self.piece,) = load.pieces
        # Blocks before this number are computed, and must not be written.
        self._fence = fence
        self._next = load.values - 1
        # Values placed, in any order, as two threads may load.
        self._done: set[int] = set()
        self.threads = 0
        self.ended_s = began_s
        self.size_bytes = 0
        self.reason: Miss | None = None
        self._lost = 0
        self.reported = False

    @property
    def lost(self) -> int:
        return self.piece.first_value + self._lost

    def first_block(self, value: int) -> int:
        return self.piece.first_block + max(0, value * self._size - self.piece.skipped_blocks)

    def raise_fence(self, block: int) -> None:
        """Keep off the blocks before ``block``, which the model computes next; wait for writes to them."""
        with self._lock:
            self._fence = block
            writing = [mark for index, (mark, _) in self._writing.items() if self.first_block(index) < block]
        for mark in writing:
            mark.wait()

    def take(self) -> int | None:
        """Return the next value to load; None at the fence, after a failure, or at the end."""
        with self._lock:
            index = self._next
            if self._closed or self.reason or index < 0 or self.first_block(index) < self._fence:
                return None
            self._next -= 1
            return index

    def place(self, index: int, block: memoryview) -> None:
        with self._lock:
            if self._closed or self.first_block(index) < self._fence:
                raise _Closed("computing has come as far")
            self._write(index, block)

    def on_value(self, index: int, reason: Miss | None, size_bytes: int) -> None:
        """Record a placed value, or the reason why not; waits until its blocks are written."""
        with self._lock:
            writing = self._writing.get(index)
        if writing is not None:
            writing[0].wait()
        with self._lock:
            self._writing.pop(index, None)
            if reason:
                self.reason, self._lost = self.reason or reason, max(self._lost, index)
                return
            self.size_bytes += size_bytes
            self._done.add(index)
            while self.load.values - 1 - self.placed in self._done:
                self.placed += 1

    @property
    def lowest(self) -> int:
        return self.first_block(self.load.values - self.placed)


class _LoadOffsetSink:
    def __init__(self, job: _Job, first: int) -> None:
        self._job = job
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._job.place(self._first + index, block)


class WorkerSide:
    """Connector in a worker. Called by a single vLLM thread; its own threads load and save."""

    def __init__(
        self,
        parts: Parts,
        shape: Shape,
        *,
        by_request: bool = False,
        rank: int = 0,
        queue_bytes: int = 512 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``by_request``: report a failed load by request, not by blocks."""
        self._parts = parts
        self._compute = parts.first.compute
        self.shape = shape
        # Required with several groups of layers, and after part of a window no request can continue.
        self._by_request = by_request
        self._rank = rank
        self._clock = clock
        self._copiers: Sequence[PartCopier] = ()
        self._memory: LockedMemory | None = None
        self._loaders = TierWorkers("vllm load", _THREADS, _WAITING)
        self._waiters = DelayedCalls("vllm wait", _WAITING_THREADS, _WAITING)
        self._waited_values = 0
        self._latencies = Latencies()
        self._saver = Saver(parts, queue_bytes)
        self._ended = threading.Condition()
        self._jobs: list[_Job] = []
        self._backward: dict[str, _BackwardJob] = {}
        self._plan = StepPlan()
        self._began: Mark = Now()
        self._timed: deque[tuple[int, Mark, Mark]] = deque()
        self._outcome = WorkerOutcome()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._finished: set[str] = set()

    def register(self, copiers: Sequence[PartCopier], memory: LockedMemory | None = None) -> None:
        """``memory``: of the store, if its values can be written where they stay."""
        self._copiers = copiers
        self._memory = memory
        if memory is not None:
            self._saver.use_rooms(memory)

    # --- one step ---

    def begin(self, plan: StepPlan) -> None:
        """Start the loads of this step and end those that it ends."""
        # Until the mark, the loads' blocks may belong to other requests. The step's time counts from it.
        self._plan, self._began = plan, self._copiers[0].mark()
        for request in plan.ends:
            if (job := self._backward.pop(request, None)) is not None:
                job.close()
                self._report_end(job)
        for waiting in self._jobs:
            if isinstance(waiting, _WaitingJob) and waiting.load.request in plan.ends:
                self._end_waiting(waiting, Miss.ABORTED)
        # This step computes the blocks before a fence: backward loads must not write them any more.
        for request, fence in plan.fences.items():
            if (job := self._backward.get(request)) is not None:
                job.raise_fence(fence)
        self._saver.reserve(plan.saves, self._rank)
        for load in plan.loads:
            if load.backward:
                self._start_backward(load, plan.fences.get(load.request, 0))
            elif load.wait_s:
                self._start_waiting(load)
            else:
                self._start(load)

    def end(self) -> None:
        """Copy out completed values after the forward pass, which is done or queued."""
        plan, self._plan = self._plan, StepPlan()
        self._saver.save(plan.saves, self._copiers, self._rank)
        if plan.tokens:
            self._timed.append((plan.tokens, self._began, self._copiers[0].mark()))
        while self._timed and self._timed[0][2].done():
            tokens, step_start, step_end = self._timed.popleft()
            self._outcome.step_tokens, self._outcome.step_s = tokens, step_end.seconds_after(step_start)
            self._compute.record(tokens, self._outcome.step_s)
        self._report_backward()
        if not plan.tokens and self._jobs:
            all_wait = all(isinstance(job, _WaitingJob) for job in self._jobs)
            with self._ended:
                self._ended.wait_for(
                    lambda: any(job.end is not None for job in self._jobs), _IDLE_SAVING_S if all_wait else _IDLE_S
                )
        elif not plan.tokens:
            self._saver.wait(_IDLE_SAVING_S)
        self._settle()

    def finished(self) -> set[str]:
        finished, self._finished = self._finished, set()
        return finished

    def failed(self) -> set[str]:
        """Return the ended requests of which nothing counts as loaded."""
        failed, self._failed = self._failed, set()
        return failed

    def invalid_blocks(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def outcome(self) -> WorkerOutcome | None:
        outcome, self._outcome = self._outcome, WorkerOutcome()
        self._saver.report(outcome)
        with self._ended:
            waited_values, self._waited_values = self._waited_values, 0
        if waited_values:
            outcome.counts["waited_values"] = waited_values
        has_report = outcome.loaded or outcome.step_tokens or outcome.counts or outcome.saving
        # vLLM leaves out a rank without a report, as if it had placed what the other ranks have.
        return outcome if has_report or self._backward else None

    def close(self, drain_s: float) -> None:
        for job in (*self._jobs, *self._backward.values()):
            job.close()
        self._loaders.close()
        self._waiters.close()
        self._saver.close(drain_s)
        if self._memory is not None:
            self._memory.close()

    # --- loads ---

    def _start(self, load: LoadRequest) -> _Job:
        # Start a load in a thread. It is given up after its patience, which grows with the time of computing instead.
        size_bytes = self._bytes(load, load.values)
        computing_s = self._compute.seconds(load.tokens)
        patience_s = (
            _UNKNOWN_S + size_bytes / _UNKNOWN_BYTES_PER_S
            if computing_s is None
            else patience_while_computing_s(computing_s, self._latencies, size_bytes)
        )
        now_s = self._clock()
        job = _Job(load, self._copiers, self._began, self.shape.blocks_per_value, now_s, now_s + patience_s)
        self._jobs.append(job)
        if not self._loaders.submit(WorkerCall(lambda: self._run(job, computing_s))):
            self._end(job, Miss.TOO_MANY_LOADS, 0)
        return job

    def _run(self, job: _Job, computing_s: float | None) -> None:
        # Load a job's values up to the first failure, then end the job. A piece is given up once loading it
        # takes longer than computing the tokens (``computing_s``).
        reason: Miss | None = None
        first = size_bytes = 0  # values before the piece; bytes loaded
        try:
            for piece in job.load.pieces:
                tally = LoadTally()
                try:
                    self._load_found(piece, piece.keys, job, first, tally, computing_s)
                finally:
                    job.settle()  # what was placed before a failure counts, too
                    size_bytes += tally.size_bytes
                if reason := next(iter(tally.failed), None):
                    break
                first += len(piece.keys)
        except _Closed:  # ``_settle`` has given it up, or the worker closes
            reason = Miss.DEADLINE
        except TIER_FAILURES as error:
            _log.warning("a load of %d values failed: %s", job.load.values, error)
            reason = Miss.UNREACHABLE
        except BaseException:
            _log.exception("a load of %d values failed by a fault of the connector", job.load.values)
            reason = Miss.FAULT
        self._end(job, reason, size_bytes)

    def _load_found(
        self, piece: Piece, keys: Sequence[bytes], job: _Job, first: int, tally: LoadTally, computing_s: float | None
    ) -> None:
        blocks = self._parts.parts[piece.part].blocks
        ours = [rank_key(key, self._rank) for key in keys]
        blocks.load_found(ours, _LoadOffsetSink(job, first), tally, PhaseClock({}), computing_s)

    def _bytes(self, load: LoadRequest, values: int) -> int:
        size_bytes = 0
        for piece in load.pieces:
            size_bytes += min(values, len(piece.keys)) * self._parts.parts[piece.part].blocks.layout.block_bytes
            values -= min(values, len(piece.keys))
        return size_bytes

    def _start_waiting(self, load: LoadRequest) -> None:
        job = _WaitingJob(load, self._copiers, self._began, self.shape.blocks_per_value, self._clock())
        self._jobs.append(job)
        self._waiters.call(lambda: self._ask(job))

    def _ask(self, job: _WaitingJob) -> None:
        # Load the next values if they are stored; ask again later for the others.
        if job.closed:
            return
        first, started_s = job.placed, self._clock()
        piece, at = job.load.at(first)
        tally, reason = LoadTally(), None
        try:
            self._load_found(piece, piece.keys[at : at + job.pace.values], job, first, tally, None)
            reason = next(iter(tally.failed), None)
        except _Closed:
            return
        except TIER_FAILURES as error:
            _log.warning("a load that waits for another engine failed: %s", error)
            reason = Miss.UNREACHABLE
        except BaseException:
            _log.exception("a load that waits for another engine failed by a fault of the connector")
            reason = Miss.FAULT
        now_s, values = self._clock(), job.placed - first
        job.on_values(values, tally.size_bytes, now_s)
        with self._ended:
            self._waited_values += values
        if job.placed == job.load.values:
            self._end_waiting(job, None)
        elif reason and reason not in NOT_YET:
            self._end_waiting(job, reason)
        else:
            pause_s = job.pace.on_values(values, now_s - started_s)
            self._waiters.call(lambda: self._ask(job), pause_s and max(pause_s, len(self._jobs) * _QUESTION_S))

    def _end_waiting(self, job: _WaitingJob, reason: Miss | None) -> None:
        job.close()
        reason = reason if job.placed < job.load.values else None
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, job.size_bytes, self._clock() - job.began_s)
            self._ended.notify_all()

    def _start_backward(self, load: LoadRequest, fence: int) -> None:
        job = _BackwardJob(load, self._copiers, self._began, self.shape.blocks_per_value, self._clock(), fence)
        self._backward[load.request] = job
        self._join(job)

    def _join(self, job: _BackwardJob) -> None:
        with self._ended:
            job.threads += self._loaders.submit(WorkerCall(lambda: self._run_backward(job)))

    def _run_backward(self, job: _BackwardJob) -> None:
        # Load values from the last to the fence; a second thread helps if the store is fast.
        while (index := job.take()) is not None:
            started_s = self._clock()
            tally, reason = LoadTally(), None
            try:
                self._load_found(job.piece, job.piece.keys[index : index + 1], job, index, tally, None)
                reason = next(iter(tally.failed), None)
            except _Closed:
                break
            except TIER_FAILURES as error:
                _log.warning("a load failed: %s", error)
                reason = Miss.UNREACHABLE
            except BaseException:
                _log.exception("a load failed by a fault of the connector")
                reason = Miss.FAULT
            job.on_value(index, reason, tally.size_bytes)
            if index == job.load.values - 1 and not reason and self._clock() - started_s < _PAIRED_S:
                self._join(job)
        with self._ended:
            job.threads -= 1
            job.ended_s = self._clock()

    def _report_end(self, job: _BackwardJob) -> None:
        if not job.reported:
            job.reported = True
            ended_s = self._clock() if job.threads else job.ended_s
            end = self._end_of(job, job.reason, job.size_bytes, ended_s - job.began_s)
            self._outcome.loaded[job.load.request] = end

    def _report_backward(self) -> None:
        for request, job in self._backward.items():
            if job.placed:
                self._outcome.lowest[request] = job.lowest  # with each step: other ranks may have loaded less
            with self._ended:
                is_finished = not job.threads
            if is_finished:
                self._report_end(job)

    def _end(self, job: _Job, reason: Miss | None, size_bytes: int) -> None:
        seconds = self._clock() - job.began_s
        if not reason:
            self._latencies.record(seconds, size_bytes)
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, size_bytes, seconds)
            self._ended.notify_all()

    def _end_of(self, job: _Job, reason: Miss | None, size_bytes: int, seconds: float) -> Loaded:
        missing_tokens = 0
        if reason and not isinstance(job, _BackwardJob):  # none of its tokens counts as loaded early
            missing_tokens = job.load.tokens if self._by_request else len(job.missing()) * self.shape.block_tokens
        lost, waited = job.lost if reason else 0, isinstance(job, _WaitingJob)
        return Loaded(lost, reason, size_bytes, seconds, missing_tokens, waited)

    def _settle(self) -> None:
        # Give up overdue loads; report those that ended.
        now_s = self._clock()
        for job in list(self._jobs):
            if isinstance(job, _WaitingJob) and job.end is None and now_s >= job.due_s:
                self._end_waiting(job, Miss.NOT_IN_TIME)
            with self._ended:
                if job.end is None and now_s >= job.due_s:
                    job.close()
                    # Loaded bytes give the rate; if nothing was loaded, the entire load takes longer than this.
                    size_bytes = self._bytes(job.load, job.placed or job.load.values)
                    job.end = self._end_of(job, Miss.DEADLINE, size_bytes, now_s - job.began_s)
            if job.end is None:
                continue
            self._jobs.remove(job)
            self._outcome.loaded[job.load.request] = job.end
            if job.end.reason and job.end.reason is not Miss.ABORTED:
                if self._by_request:
                    self._failed.add(job.load.request)
                else:
                    self._invalid |= set(job.missing())
            self._finished.add(job.load.request)


@dataclass(slots=True)
class _Waiting:
    """Value copied out of the cache that waits to be stored, complete once ``copied`` is done."""

    save_key: bytes
    key: bytes
    place: Place
    value: memoryview
    copied: Mark
    part: int
    room: Room | None = None

    @property
    def ticket(self) -> StoreTicket | None:
        return self.room.ticket if self.room is not None else None


class Saver:
    """Bounded queue of copied-out values; a single thread stores them."""

    def __init__(self, parts: Parts, queue_bytes: int) -> None:
        self._parts = parts
        self._value_bytes = [PAYLOAD_AT + part.blocks.layout.block_bytes for part in parts.parts]
        # Buffers by part, for reuse: the first touch of memory is ten times slower.
        self._free: list[list[memoryview]] = [[] for _ in parts.parts]
        self._memory: LockedMemory | None = None
        self._rooms: RoomReserver | None = None
        # Rooms of failed copies, which the device may still write.
        self._lost_rooms: list[Room] = []
        self._waiting: deque[_Waiting] = deque()
        # Number of values not stored yet.
        self._held = 0
        self._held_bytes = ByteBudget(queue_bytes)
        self._changed = threading.Condition()
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._read_back: list[tuple[int, float]] = []
        self._saved: list[bytes] = []
        self._unsaved: list[bytes] = []
        # True until the first values are stored: they are loaded again to measure the store.
        self._reads_back = True
        self._thread: threading.Thread | None = None

    def use_rooms(self, memory: LockedMemory) -> None:
        self._memory, self._rooms = memory, RoomReserver(self._parts.first.store)

    def reserve(self, saves: Sequence[Save], rank: int) -> None:
        """Begin to reserve room for this step's values."""
        if self._rooms is not None and self._memory is not None and saves and self._memory.is_whole:
            sizes = [(rank_key(save.key, rank), self._value_bytes[save.part]) for save in saves]
            self._rooms.reserve(sizes, [Place(save.depth, save.parent) for save in saves])

    def save(self, saves: Sequence[Save], copiers: Sequence[PartCopier], rank: int) -> None:
        """Copy the values out, into room of the store or a buffer, and queue them; beyond the limit they are dropped
        and counted.
        """
        rooms = self._rooms.take() if self._rooms is not None and saves else {}
        in_rooms = []
        for save in saves:
            key = rank_key(save.key, rank)
            waiting = self._copy_out(save, copiers[save.part], key, rooms.get(key))
            if waiting is not None and waiting.room is not None:
                del rooms[key]
                in_rooms.append(waiting)
            elif waiting is not None:
                self._queue([waiting])
        if self._rooms is not None:
            self._rooms.give_back(rooms.values(), [waiting.room.ticket for waiting in in_rooms if waiting.room])
        if in_rooms:
            self._queue(in_rooms)

    def _copy_out(self, save: Save, copier: PartCopier, key: bytes, room: Room | None) -> _Waiting | None:
        size_bytes, free = self._value_bytes[save.part], self._free[save.part]
        with self._changed:
            if self._stopping or not self._held_bytes.has_room(size_bytes):
                self._counts["dropped_values"] += 1
                self._unsaved.append(save.key)
                return None
            self._held += 1
            self._held_bytes.change(size_bytes)
            if room is None and not free:
                free += copier.buffers(size_bytes)
            value = free.pop() if room is None else room.value
        try:
            copied = copier.read(save.blocks, value[PAYLOAD_AT:])
        except Exception:  # the model's step goes on
            _log.exception("a value could not be copied out by a fault of the connector")
            with self._changed:
                self._held -= 1
                self._held_bytes.change(-size_bytes)
                if room is None:
                    free.append(value)
                else:
                    self._lost_rooms.append(room)
                self._counts["refused_values"] += 1
                self._unsaved.append(save.key)
            return None
        return _Waiting(save.key, key, Place(save.depth, save.parent), value, copied, save.part, room)

    def _queue(self, copied: Sequence[_Waiting]) -> None:
        with self._changed:
            self._waiting += copied
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm save", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def report(self, outcome: WorkerOutcome) -> None:
        with self._changed:
            outcome.saving = self._held
            outcome.counts, self._counts = dict(self._counts), Counter()
            outcome.read_back, self._read_back = self._read_back, []
            outcome.saved, self._saved = self._saved, []
            outcome.unsaved, self._unsaved = self._unsaved, []

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held, seconds)

    def close(self, drain_s: float) -> None:
        """Store waiting values for up to ``drain_s``. `vllm serve` calls this only with a ``--shutdown-timeout``."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(drain_s)
        with self._changed:
            unsaved = list(self._waiting)
            self._waiting.clear()
        if unsaved:
            _log.warning("%d values were not saved: the store took longer than %g s", len(unsaved), drain_s)
        for waiting in unsaved:
            if waiting.room is not None:
                waiting.copied.wait()  # the device writes there until then
        if self._rooms is not None:
            self._rooms.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                ticket = self._waiting[0].ticket
                batch = [self._waiting.popleft()]
                while self._waiting and self._waiting[0].ticket is ticket and len(batch) < VALUES_TOGETHER:
                    batch.append(self._waiting.popleft())
            self._store_batch(batch, ticket)
            del batch, ticket

    def _store_batch(self, batch: list[_Waiting], ticket: StoreTicket | None) -> None:
        counts, saved, unsaved = Counter[str](), list[bytes](), [waiting.save_key for waiting in batch]
        try:
            for waiting in batch:
                waiting.copied.wait()
            counts, saved, unsaved = self._store(batch, ticket)
        except TIER_FAILURES as error:
            counts["refused_values"] += len(batch)
            _log.warning("%d values could not be saved: %s", len(batch), error)
        except Exception:
            counts["refused_values"] += len(batch)
            _log.exception("%d values could not be saved by a fault of the connector", len(batch))
        with self._changed:
            self._held -= len(batch)
            for waiting in batch:
                self._held_bytes.change(-self._value_bytes[waiting.part])
                if waiting.room is None:
                    self._free[waiting.part].append(waiting.value)
            self._counts.update(counts)
            self._saved += saved
            self._unsaved += unsaved
            self._changed.notify_all()

    def _store(
        self, batch: list[_Waiting], ticket: StoreTicket | None
    ) -> tuple[Counter[str], list[bytes], list[bytes]]:
        """Store what the store lacks; return counts, the keys that it has now, and the keys that it did not take."""
        started_s = time.perf_counter()
        blocks, presence, missing = self._parts.first, [Presence.MISS] * len(batch), batch
        if ticket is None:  # room is reserved only for what is missing
            presence = blocks.store.lookup([waiting.key for waiting in batch])
            missing = [waiting for waiting, present in zip(batch, presence, strict=True) if present is Presence.MISS]
        for waiting in missing:
            layout = self._parts.parts[waiting.part].blocks.layout
            waiting.value[:PAYLOAD_AT] = block_header(waiting.key, layout, 0, waiting.value[PAYLOAD_AT:])
            if waiting.room is not None and (crc := crc_by_header(waiting.key, waiting.value)) is not None:
                waiting.room.ticket.crcs[waiting.room.at] = crc  # the payload is long: it is read once
        if ticket is None:
            items = [(waiting.key, waiting.value) for waiting in missing]
            done = blocks.put(items, [waiting.place for waiting in missing])
        else:
            committed = blocks.store.complete_store(ticket)
            done = [committed[waiting.room.at] for waiting in missing if waiting.room is not None]
        took_s = time.perf_counter() - started_s
        stored = [waiting for waiting, ok in zip(missing, done, strict=True) if ok]
        if self._reads_back and stored and not self._stopping:
            self._reads_back = False
            self._load(stored[:_READ_BACK])
        counts = Counter(
            saved_values=len(stored),
            saved_in_place=0 if ticket is None else len(stored),
            present_values=len(batch) - len(missing),
            refused_values=len(missing) - len(stored),
            saved_bytes=sum(len(waiting.value) for waiting in stored),
            saving_us=round(took_s * 1e6),
        )
        # Values that another engine is storing are in neither list.
        present = [waiting for waiting, state in zip(batch, presence, strict=True) if state is Presence.HIT]
        unsaved = [waiting.save_key for waiting, ok in zip(missing, done, strict=True) if not ok]
        return counts, [waiting.save_key for waiting in present + stored], unsaved

    def _load(self, stored: list[_Waiting]) -> None:
        """Load stored values, to measure the link before a prompt needs it."""
        for number, some in enumerate((stored[:1], stored[:1], stored)):
            started_s = time.perf_counter()
            values = self._parts.first.store.get_many([waiting.key for waiting in some])
            measured = sum(len(waiting.value) - PAYLOAD_AT for waiting in some), time.perf_counter() - started_s
            if number and all(value is not None for value in values):  # the first touches fresh memory
                with self._changed:
                    self._read_back.append(measured)
