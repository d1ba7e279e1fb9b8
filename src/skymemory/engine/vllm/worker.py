"""The connector in a worker of vLLM: loads values into its blocks and saves blocks as values, beside its steps.

Each step, in this order: ``begin`` (its loads start), the forward, ``end`` (completed values are copied out; a thread
stores them), ``finished``, ``invalid_blocks`` and ``outcome`` (what has ended).

A load that waits for another engine (``waiting``) asks for its next values again and again until all have come, or for
too long none has.

A load that takes longer than computing its tokens is given up. Its thread may hang in the store, but writes no block
any more: ``_Job`` has a lock for that, since vLLM hands the blocks to another request then.

On an accelerator all of this runs ahead of the device (``copier``). What is said is true there as well: a load has
ended when its blocks are written, a value is stored when it is read, a step takes what the device takes.
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
from skymemory.cache.tiers.workers import Call, TierWorkers
from skymemory.engine.vllm.copier import Mark, Now, PartCopier
from skymemory.engine.vllm.plan import GIVEN_UP, Load, Loaded, Outcome, Piece, Plan, Save, Shape, rank_key
from skymemory.engine.vllm.waiting import ABORTED, NOT_STORED, NOT_YET, DelayedCalls, Pace
from skymemory.kv.block import Place
from skymemory.kv.value import PAYLOAD_AT, block_header
from skymemory.store.base import Presence

_log = logging.getLogger(__name__)

_THREADS = 4
_WAITING_THREADS = 4
_QUESTION_S = 0.0005
"""A question of a load that waits keeps the interpreter about so long: many such loads pause longer, for the model's
sake.
"""
_PAIRED_S = 0.5
"""Where a value came within, a second thread loads too: one is being verified and copied while the next is fetched. On
a slower link each would only wait for the other, at last for longer than a store may take to answer.
"""
_UNKNOWN_S = 10.0
_UNKNOWN_BYTES_PER_S = 1e6
"""A load is given up after so long, where it is not known how long computing takes."""
_IDLE_S = 0.002
"""So long a step that computes nothing waits for a load to end: else vLLM would spin, and slow the loads."""
_IDLE_SAVING_S = 0.005
"""So long it waits for the saves, which no request waits for; one that comes meanwhile does. Likewise for loads that
another engine's prefill holds up.
"""
_READ_BACK = 4
_SAVED_AT_ONCE = 16
_WAITING = 1 << 16


class _Closed(RuntimeError):
    """The load was given up: its blocks are no longer its own."""


class _Job:
    """One load under way: a sink that writes into the request's blocks, until it is closed."""

    def __init__(
        self,
        load: Load,
        copiers: Sequence[PartCopier],
        after: Mark,
        blocks_per_value: int,
        began_s: float,
        due_s: float,
    ) -> None:
        """``copiers`` by part; ``after``: until then the blocks may be another request's."""
        self.load = load
        self._copiers = copiers
        self._after = after
        self._size = blocks_per_value
        self.began_s, self.due_s = began_s, due_s
        self._writing: dict[int, Mark] = {}
        """By value."""
        self._lock = threading.Lock()
        self._closed = False
        self.placed = 0
        """Leading values in place."""
        self.end: Loaded | None = None

    def place(self, index: int, block: memoryview) -> None:
        with self._lock:
            if self._closed:
                raise _Closed("the load was given up")
            self._write(index, block)
            self.placed = index + 1

    def _write(self, index: int, block: memoryview) -> None:
        piece, at = self.load.at(index)
        skipped, blocks = piece.places(at, self._size)
        if any(blocks):
            copier = self._copiers[piece.part]
            self._writing[index] = copier.write(blocks, block, skipped, self._size, self._after)

    def close(self) -> None:
        """When this returns, nothing is written any more."""
        with self._lock:
            self._closed = True
        self.settle()

    def settle(self) -> None:
        """Until all that was placed is in its blocks."""
        with self._lock:
            writing = list(self._writing.values())
        for mark in writing:
            mark.wait()

    @property
    def lost(self) -> int:
        """Number in the request of the first value that was not placed."""
        if self.placed == self.load.values:
            return self.load.pieces[0].first_value + len(self.load.pieces[0].keys)
        piece, at = self.load.at(self.placed)
        return piece.first_value + at

    def missing(self) -> tuple[int, ...]:
        """The blocks that were not written, where the model has one group of layers."""
        (piece,) = self.load.pieces
        return piece.blocks[0][max(0, self.placed * self._size - piece.skipped_blocks) :]


class _WaitingJob(_Job):
    """A load of what another engine stores meanwhile: one question after the other."""

    def __init__(
        self, load: Load, copiers: Sequence[PartCopier], after: Mark, blocks_per_value: int, began_s: float
    ) -> None:
        super().__init__(load, copiers, after, blocks_per_value, began_s, began_s + load.wait_s)
        self.pace = Pace()
        self.size_bytes = 0

    @property
    def closed(self) -> bool:
        with self._lock:
            return self._closed

    def came(self, values: int, size_bytes: int, now_s: float) -> None:
        """So many more are in place."""
        if values:
            self.size_bytes += size_bytes
            self.due_s = now_s + self.load.wait_s


class _BackwardJob(_Job):
    """Cake's side of a prompt: values from the last one on, above the fence, by one thread or two."""

    def __init__(
        self,
        load: Load,
        copiers: Sequence[PartCopier],
        after: Mark,
        blocks_per_value: int,
        began_s: float,
        fence: int,
    ) -> None:
        super().__init__(load, copiers, after, blocks_per_value, began_s, math.inf)
        (self.piece,) = load.pieces
        self._fence = fence
        self._next = load.values - 1
        self._done: set[int] = set()
        self.threads = 0
        self.ended_s = began_s
        """When the last of its threads ended, which may be long before the step does."""
        self.size_bytes = 0
        self.reason = ""
        self._lost = 0
        self.reported = False

    @property
    def lost(self) -> int:
        return self.piece.first_value + self._lost

    def first_block(self, value: int) -> int:
        """Number in the request of the first block that comes from it."""
        return self.piece.first_block + max(0, value * self._size - self.piece.skipped_blocks)

    def raise_fence(self, block: int) -> None:
        with self._lock:
            self._fence = block
            writing = [mark for index, mark in self._writing.items() if self.first_block(index) < block]
        for mark in writing:
            mark.wait()

    def take(self) -> int | None:
        """The next value to load; None if there is none."""
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

    def came(self, index: int, reason: str, size_bytes: int) -> None:
        """A value was placed, or why not; counts when its blocks are written."""
        if (mark := self._writing.get(index)) is not None:
            mark.wait()
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
        """The first block from which on all are in place."""
        return self.first_block(self.load.values - self.placed)


class _From:
    """A sink for values of a load from its value ``first`` on."""

    def __init__(self, job: _Job, first: int) -> None:
        self._job = job
        self._first = first

    def place(self, index: int, block: memoryview) -> None:
        self._job.place(self._first + index, block)


class WorkerSide:
    """Called by one thread of vLLM's; its own threads load and save."""

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
        """``by_request``: of a load that fails vLLM gets the request, not the blocks. It knows no other way where a
        model has several groups of layers; and behind part of a window no request can go on.
        """
        self._parts = parts
        self._compute = parts.first.compute
        self.shape = shape
        self._by_request = by_request
        self._rank = rank
        self._clock = clock
        self._copiers: Sequence[PartCopier] = ()
        self._loaders = TierWorkers("vllm load", _THREADS, _WAITING)
        self._waiters = DelayedCalls("vllm wait", _WAITING_THREADS, _WAITING)
        self._waited_values = 0
        """Since the last step."""
        self._latencies = Latencies()
        self._saver = Saver(parts, queue_bytes)
        self._ended = threading.Condition()
        self._jobs: list[_Job] = []
        self._backward: dict[str, _BackwardJob] = {}
        self._plan = Plan()
        self._began: Mark = Now()
        self._timed: deque[tuple[int, Mark, Mark]] = deque()
        """Steps that the device may not have done yet: their tokens, begin and end."""
        self._outcome = Outcome()
        self._invalid: set[int] = set()
        self._failed: set[str] = set()
        self._finished: set[str] = set()

    def register(self, copiers: Sequence[PartCopier]) -> None:
        """The blocks are there; ``copiers`` by part."""
        self._copiers = copiers

    # --- one step ---

    def begin(self, plan: Plan) -> None:
        """Its metadata came: loads start."""
        self._plan, self._began = plan, self._copiers[0].mark()
        for request in plan.ends:
            if (job := self._backward.pop(request, None)) is not None:
                job.close()
                self._report_end(job)
        for waiting in self._jobs:
            if isinstance(waiting, _WaitingJob) and waiting.load.request in plan.ends:
                self._end_waiting(waiting, ABORTED)
        for request, fence in plan.fences.items():
            if (job := self._backward.get(request)) is not None:
                job.raise_fence(fence)
        for load in plan.loads:
            if load.backward:
                self._start_backward(load, plan.fences.get(load.request, 0))
            elif load.wait_s:
                self._start_waiting(load)
            else:
                self._start(load)

    def end(self) -> None:
        """The forward is done, or given to the device: completed values are copied out behind it."""
        plan, self._plan = self._plan, Plan()
        for save in plan.saves:
            self._saver.save(save, self._copiers[save.part], rank_key(save.key, self._rank))
        if plan.tokens:
            self._timed.append((plan.tokens, self._began, self._copiers[0].mark()))
        while self._timed and self._timed[0][2].done():
            tokens, began, ended = self._timed.popleft()
            self._outcome.step_tokens, self._outcome.step_s = tokens, ended.seconds_after(began)
            self._compute.took(tokens, self._outcome.step_s)
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
        """Requests whose loads have ended since the last step, well or not."""
        finished, self._finished = self._finished, set()
        return finished

    def failed(self) -> set[str]:
        """Of those that have ended, requests of which nothing counts as loaded."""
        failed, self._failed = self._failed, set()
        return failed

    def invalid_blocks(self) -> set[int]:
        """Blocks that were not loaded since the last step."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def outcome(self) -> Outcome | None:
        """Since the last step; None if there is nothing to say."""
        outcome, self._outcome = self._outcome, Outcome()
        self._saver.report(outcome)
        with self._ended:
            waited_values, self._waited_values = self._waited_values, 0
        if waited_values:
            outcome.counts["waited_values"] = waited_values
        said = outcome.loaded or outcome.step_tokens or outcome.counts or outcome.saving
        # vLLM leaves out a rank that says nothing, as if it had placed what the others have.
        return outcome if said or self._backward else None

    def close(self, drain_s: float) -> None:
        """Stores what waits, as long as ``drain_s``; loads end as given up. See ``Saver.close``."""
        for job in (*self._jobs, *self._backward.values()):
            job.close()
        self._loaders.close()
        self._waiters.close()
        self._saver.close(drain_s)

    # --- loads ---

    def _start(self, load: Load) -> _Job:
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
        if not self._loaders.submit(Call(lambda: self._run(job, computing_s))):
            self._end(job, "too many loads", 0)
        return job

    def _run(self, job: _Job, computing_s: float | None) -> None:
        """In a thread."""
        reason, first, size_bytes = "", 0, 0
        try:
            for piece in job.load.pieces:
                tally = LoadTally()
                try:
                    self._load_found(piece, piece.keys, job, first, tally, computing_s)
                finally:
                    job.settle()  # what came before a failure counts, too
                    size_bytes += tally.size_bytes
                if reason := next(iter(tally.failed), ""):
                    break
                first += len(piece.keys)
        except _Closed:
            reason = GIVEN_UP
        except TIER_FAILURES as error:
            _log.warning("a load of %d values failed: %s", job.load.values, error)
            reason = "unreachable"
        except BaseException:
            _log.exception("a load of %d values failed by a fault of the connector", job.load.values)
            reason = "fault"
        self._end(job, reason, size_bytes)

    def _load_found(
        self, piece: Piece, keys: Sequence[bytes], job: _Job, first: int, tally: LoadTally, computing_s: float | None
    ) -> None:
        """Load some consecutive values of a piece: the first is value ``first`` of the job."""
        blocks = self._parts.parts[piece.part].blocks
        ours = [rank_key(key, self._rank) for key in keys]
        blocks.load_found(ours, _From(job, first), tally, PhaseClock(time.perf_counter, {}), computing_s)

    def _bytes(self, load: Load, values: int) -> int:
        """Of its first ``values``."""
        size_bytes = 0
        for piece in load.pieces:
            size_bytes += min(values, len(piece.keys)) * self._parts.parts[piece.part].blocks.layout.block_bytes
            values -= min(values, len(piece.keys))
        return size_bytes

    def _start_waiting(self, load: Load) -> None:
        job = _WaitingJob(load, self._copiers, self._began, self.shape.blocks_per_value, self._clock())
        self._jobs.append(job)
        self._waiters.call(lambda: self._ask(job))

    def _ask(self, job: _WaitingJob) -> None:
        """In a thread: once for the next values of a load that waits. Then it is queued again, or after a pause."""
        if job.closed:
            return
        first, began_s = job.placed, self._clock()
        piece, at = job.load.at(first)
        tally, reason = LoadTally(), ""
        try:
            self._load_found(piece, piece.keys[at : at + job.pace.values], job, first, tally, None)
            reason = next(iter(tally.failed), "")
        except _Closed:
            return
        except TIER_FAILURES as error:
            _log.warning("a load that waits for another engine failed: %s", error)
            reason = "unreachable"
        except BaseException:
            _log.exception("a load that waits for another engine failed by a fault of the connector")
            reason = "fault"
        now_s, values = self._clock(), job.placed - first
        job.came(values, tally.size_bytes, now_s)
        with self._ended:
            self._waited_values += values
        if job.placed == job.load.values:
            self._end_waiting(job, "")
        elif reason and reason not in NOT_YET:
            self._end_waiting(job, reason)
        else:
            pause_s = job.pace.came(values, now_s - began_s)
            self._waiters.call(lambda: self._ask(job), pause_s and max(pause_s, len(self._jobs) * _QUESTION_S))

    def _end_waiting(self, job: _WaitingJob, reason: str) -> None:
        job.close()
        reason = reason if job.placed < job.load.values else ""
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, job.size_bytes, self._clock() - job.began_s)
            self._ended.notify_all()

    def _start_backward(self, load: Load, fence: int) -> None:
        job = _BackwardJob(load, self._copiers, self._began, self.shape.blocks_per_value, self._clock(), fence)
        self._backward[load.request] = job
        self._join(job)

    def _join(self, job: _BackwardJob) -> None:
        with self._ended:
            job.threads += self._loaders.submit(Call(lambda: self._run_backward(job)))

    def _run_backward(self, job: _BackwardJob) -> None:
        """In a thread: value after value, until it meets what is computed."""
        while (index := job.take()) is not None:
            began_s = self._clock()
            tally, reason = LoadTally(), ""
            try:
                self._load_found(job.piece, job.piece.keys[index : index + 1], job, index, tally, None)
                reason = next(iter(tally.failed), "")
            except _Closed:
                break
            except TIER_FAILURES as error:
                _log.warning("a load failed: %s", error)
                reason = "unreachable"
            except BaseException:
                _log.exception("a load failed by a fault of the connector")
                reason = "fault"
            job.came(index, reason, tally.size_bytes)
            if index == job.load.values - 1 and not reason and self._clock() - began_s < _PAIRED_S:
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
                self._outcome.lowest[request] = job.lowest  # with each step: other ranks may have come less far
            with self._ended:
                ended = not job.threads
            if ended:
                self._report_end(job)

    def _end(self, job: _Job, reason: str, size_bytes: int) -> None:
        seconds = self._clock() - job.began_s
        if not reason:
            self._latencies.took(seconds, size_bytes)
        with self._ended:
            if job.end is None:
                job.end = self._end_of(job, reason, size_bytes, seconds)
            self._ended.notify_all()

    def _end_of(self, job: _Job, reason: str, size_bytes: int, seconds: float) -> Loaded:
        missing_tokens = 0
        if reason and not isinstance(job, _BackwardJob):  # of which none counts as loaded before it is
            missing_tokens = job.load.tokens if self._by_request else len(job.missing()) * self.shape.block_tokens
        lost, waited = job.lost if reason else 0, isinstance(job, _WaitingJob)
        return Loaded(lost, reason, size_bytes, seconds, missing_tokens, waited)

    def _settle(self) -> None:
        """Report the loads that have ended, and give up those that are overdue."""
        now_s = self._clock()
        for job in list(self._jobs):
            if isinstance(job, _WaitingJob) and job.end is None and now_s >= job.due_s:
                self._end_waiting(job, NOT_STORED)
            with self._ended:
                if job.end is None and now_s >= job.due_s:
                    job.close()
                    # What came says what the rate is; where nothing did, all of it takes longer than this.
                    came = self._bytes(job.load, job.placed or job.load.values)
                    job.end = self._end_of(job, GIVEN_UP, came, now_s - job.began_s)
            if job.end is None:
                continue
            self._jobs.remove(job)
            self._outcome.loaded[job.load.request] = job.end
            if job.end.reason and job.end.reason != ABORTED:
                if self._by_request:
                    self._failed.add(job.load.request)
                else:
                    self._invalid |= set(job.missing())
            self._finished.add(job.load.request)


@dataclass(slots=True)
class _Waiting:
    save_key: bytes
    key: bytes
    """Of this rank's part."""
    place: Place
    value: memoryview
    copied: Mark
    part: int


class Saver:
    """Values on their way to the store, copied out and bounded; one thread stores them."""

    def __init__(self, parts: Parts, queue_bytes: int) -> None:
        self._parts = parts
        self._value_bytes = [PAYLOAD_AT + part.blocks.layout.block_bytes for part in parts.parts]
        self._most_bytes = queue_bytes
        self._free: list[list[memoryview]] = [[] for _ in parts.parts]
        """By part, of values that were stored: memory that is touched for the first time is ten times slower."""
        self._waiting: deque[_Waiting] = deque()
        self._held = 0
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._counts: Counter[str] = Counter()
        self._read_back: list[tuple[int, float]] = []
        self._saved: list[bytes] = []
        self._unsaved: list[bytes] = []
        self._reads_back = True
        self._thread: threading.Thread | None = None

    def save(self, save: Save, copier: PartCopier, key: bytes) -> None:
        """Copy the value out and queue it; where there is no room it is dropped, and counted."""
        size_bytes, free = self._value_bytes[save.part], self._free[save.part]
        with self._changed:
            if (self._held and self._held_bytes + size_bytes > self._most_bytes) or self._stopping:
                self._counts["dropped_values"] += 1
                self._unsaved.append(save.key)
                return
            self._held += 1
            self._held_bytes += size_bytes
            if not free:
                free += copier.buffers(size_bytes)
            value = free.pop()
        try:
            copied = copier.read(save.blocks, value[PAYLOAD_AT:])
        except Exception:  # the model's step goes on
            _log.exception("a value could not be copied out by a fault of the connector")
            with self._changed:
                self._held -= 1
                self._held_bytes -= size_bytes
                free.append(value)
                self._counts["refused_values"] += 1
                self._unsaved.append(save.key)
            return
        with self._changed:
            self._waiting.append(_Waiting(save.key, key, Place(save.depth, save.parent), value, copied, save.part))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vllm save", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def report(self, outcome: Outcome) -> None:
        """What happened since the last call, and how many values are held now."""
        with self._changed:
            outcome.saving = self._held
            outcome.counts, self._counts = dict(self._counts), Counter()
            outcome.read_back, self._read_back = self._read_back, []
            outcome.saved, self._saved = self._saved, []
            outcome.unsaved, self._unsaved = self._unsaved, []

    def wait(self, seconds: float) -> None:
        """Until all is saved, so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held, seconds)

    def close(self, drain_s: float) -> None:
        """Stores what waits, as long as ``drain_s``.

        How long it may take is vLLM's to say. `vllm serve` kills its workers at SIGTERM without calling this, unless
        it has a ``--shutdown-timeout`` in seconds; then it goes on stepping until all is saved (``SchedulerSide``'s
        ``saving``) and calls this with nothing left to do. vLLM's ``LLM`` gives 5 s at its end.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(drain_s)
        with self._changed:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            _log.warning("%d values were not saved: the store took longer than %g s", left, drain_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                batch = [self._waiting.popleft() for _ in range(min(_SAVED_AT_ONCE, len(self._waiting)))]
            counts, saved, unsaved = Counter[str](), list[bytes](), [one.save_key for one in batch]
            try:
                for one in batch:
                    one.copied.wait()
                counts, saved, unsaved = self._store(batch)
            except TIER_FAILURES as error:
                counts["refused_values"] += len(batch)
                _log.warning("%d values could not be saved: %s", len(batch), error)
            except Exception:
                counts["refused_values"] += len(batch)
                _log.exception("%d values could not be saved by a fault of the connector", len(batch))
            with self._changed:
                self._held -= len(batch)
                for one in batch:
                    self._held_bytes -= self._value_bytes[one.part]
                    self._free[one.part].append(one.value)
                self._counts.update(counts)
                self._saved += saved
                self._unsaved += unsaved
                self._changed.notify_all()

    def _store(self, batch: list[_Waiting]) -> tuple[Counter[str], list[bytes], list[bytes]]:
        """Store those of ``batch`` that the store does not have; returns counts, the keys that it has now, and those
        that it did not take. One that another engine is storing is neither: that may fail.
        """
        began_s = time.perf_counter()
        blocks = self._parts.first
        presence = blocks.store.lookup([one.key for one in batch])
        missing = [one for one, present in zip(batch, presence, strict=True) if present is Presence.MISS]
        for one in missing:
            layout = self._parts.parts[one.part].blocks.layout
            one.value[:PAYLOAD_AT] = block_header(one.key, layout, 0, one.value[PAYLOAD_AT:])
        done = blocks.put([(one.key, one.value) for one in missing], [one.place for one in missing])
        took_s = time.perf_counter() - began_s
        stored = [one for one, ok in zip(missing, done, strict=True) if ok]
        if self._reads_back and stored and not self._stopping:
            self._reads_back = False
            self._load(stored[:_READ_BACK])
        counts = Counter(
            saved_values=len(stored),
            present_values=len(batch) - len(missing),
            refused_values=len(missing) - len(stored),
            saved_bytes=sum(len(one.value) for one in stored),
            saving_us=round(took_s * 1e6),
        )
        present = [one for one, there in zip(batch, presence, strict=True) if there is Presence.HIT]
        unsaved = [one.save_key for one, ok in zip(missing, done, strict=True) if not ok]
        return counts, [one.save_key for one in present + stored], unsaved

    def _load(self, stored: list[_Waiting]) -> None:
        """Once, for the link's latency and rate: else the first prompt that is found stored would have to try them."""
        for number, some in enumerate((stored[:1], stored[:1], stored)):
            began_s = time.perf_counter()
            values = self._parts.first.store.get_many([one.key for one in some])
            took = sum(len(one.value) - PAYLOAD_AT for one in some), time.perf_counter() - began_s
            if number and all(value is not None for value in values):  # the first one touches fresh memory
                with self._changed:
                    self._read_back.append(took)
