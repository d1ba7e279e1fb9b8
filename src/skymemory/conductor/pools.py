"""Elastic pools: how many instances prefill and how many decode follows the load. One instance at a time changes its
role, by draining.

The caller samples its instances, calls ``PoolController.observe`` every second or so, and carries out what it returns:
it closes the instance to new requests, waits until its last one has ended (a prefill instance works off its queue, a
decode instance its batch and the requests on their way to it), and opens it in the other role. The controller reads
the progress from the next samples. No I/O, no clock.

**The control law: need by time, what can be spared by work.** Both are smoothed over time::

    need      prefill   TAIL · queue_s / ttft objective, the mean of the instances
              decode    max((1 - idle / tbt_s) / (1 - idle / tbt objective), kv_share), the mean of the requests
              1: at the objective

    demand    prefill   Σ max(1 if it has work, else 0, queue_s / ttft objective)
              decode    Σ max((1 - shared / tbt_s) / (1 - idle / tbt objective), 1 - (1 - kv_share) · shared / tbt_s)
              a number of instances, so it does not jump when one moves

    load      demand / serving instances; 1: no more work fits within the objective

The need says whether requests are late, or about to be. A busy pool may answer all within its objective: it gets none.

* Prefill: waits are spread, in a busy pool about exponentially, so that one in twenty is above ``TAIL`` means. The mean
  itself comes too late: an admission rule refuses what would wait longer than the objective, so it never gets there.
* Decode: 0 for a request alone, 1 at the objective or with full memory, beyond which requests wait.

The demand is proportional to the work, which a move divides among one more or one less.

* Prefill: the busy share shows what a pool can spare; a queue beyond the objective how many it takes to work that off.
* Decode: a batch of ``n`` takes ``tbt = shared + c·n`` a step and makes ``n / tbt`` tokens a second, which is
  ``(1 - shared / tbt) / c``. A request that meets such batches has ``idle / (1 - c · tokens a second)`` between its
  own, so the first term is that rate over the one at the objective. The second is over the one with full memory, where
  ``n`` is ``n / kv_share``. An engine that computes one request after the other shares nothing: its demand is its busy
  share. The time itself is no measure: with one instance less, steps are slower, so answers take longer and batches
  grow by more than the share of the one that left. Beyond full memory requests wait, and ``kv_share`` itself counts.

An instance moves from G to R when all of these hold:

1. ``need(R) ≥ high``: R needs it. Below, requests meet their objectives, and a drain costs for nothing.
2. ``left = demand(G) / (serving(G) - 1) · growth ≤ low``: G keeps its objective without it. With both pools
   overloaded none moves. ``growth`` is ``1 + 1 / serving(R)``, at most ``MOST_GROWTH``: what R could not take was
   refused, or waits in front of G; with one more instance that much more flows through both. Where G prefills, its
   queue counts, too: one with the load ρ is as long as ``ρ / (1 - ρ)`` times something that a move does not change (the
   requests' lengths), so its need without the instance is known, and is at most 1. Long requests, or bursts, need more
   than their work.
3. ``left · (1 + margin) ≤ load(R)``: what G will bear is less, by a margin, than what R bears now.
4. G keeps one. Where its others fail during the drain, that is called off.
5. No change is under way, and since the end of the last one ``settle_s`` plus ``drain_weight`` times its drain have
   passed: the longer a drain took, the more a wrong one costs.

The third rule is the hysteresis. A move back would need what R bore before the move to be less, by the margin, than
what G bears after it: the third rule required the opposite. So under constant demands no move is undone, all moves go
in one direction, and they end after fewer than there are instances.

Mooncake's loads swing in opposition: what waits for prefill now decodes later, and reacting to the lagging pool feeds
the swing. Against this, demands are smoothed, the second rule looks at both pools at once, and a change waits until
the last one shows (``settle_s``).

The one that drains soonest goes: least queue, then fewest requests. Its memory of KV blocks is the caller's to keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput

TAIL = 3.0
"""Of exponential waits, ``exp(-3)`` are longer than three times their mean: 5 %."""
MOST_GROWTH = 1.25
"""Assumed growth of the flow by one more instance; a pool of one, doubled, rarely had twice the requests refused."""

Role = Literal["prefill", "decode"]
State = Literal["serving", "draining", "down"]
ROLES: tuple[Role, ...] = get_args(Role)
STATES: tuple[State, ...] = get_args(State)


def other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """One instance now."""

    name: str
    role: Role
    """The one it has; while draining, the one it is about to give up."""
    state: State = "serving"
    """``draining``: closed to new requests, for whatever reason. ``down``: neither serves nor drains."""
    fixed: bool = False
    """It counts in its pool, and never changes its role."""
    queue_s: float = 0.0
    """Prefill: estimated seconds of work that it has, the current prefill included."""
    tbt_s: float = 0.0
    """Decode: seconds between tokens, with all requests that are there; 0: idle."""
    kv_share: float = 0.0
    """Decode: KV memory that its requests need, those that wait included, as a share of what it has; may exceed 1."""
    in_flight: int = 0
    """Requests that were sent to it and have not ended."""

    def __post_init__(self) -> None:
        if self.role not in ROLES or self.state not in STATES:
            raise InvalidInput(
                f"instance {self.name!r} has role {self.role!r} and state {self.state!r}; "
                f"expected one of {', '.join(ROLES)} and one of {', '.join(STATES)}"
            )
        for name in ("queue_s", "tbt_s", "kv_share", "in_flight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(f"instance {self.name!r}: {name} is {getattr(self, name):g}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class RoleChange:
    """``instance`` shall have ``role``: to be drained and opened in it; if it has it, its drain is called off."""

    instance: str
    role: Role
    reason: str
    """One sentence with figures."""


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    high: float = 0.85
    """Need from which a pool gets an instance."""
    low: float = 0.9
    """Largest load of the pool that gives it, without it."""
    margin: float = 0.1
    """How much less than the other's that load must be, as a share."""
    smoothing_s: float = 20.0
    """Time constant of the demands."""
    settle_s: float = 20.0
    """Least time between the end of a change and the next; also before the first."""
    drain_weight: float = 0.5
    """Part of the last drain's seconds that is added to it."""
    most_drain_s: float = 900.0
    """A change that takes longer is called off: its instance serves in its old role again."""
    idle_tbt_s: float = 0.0
    """Seconds between tokens of a request that decodes alone; 0: unknown, and a decode pool's need and load are the
    larger of ``tbt_s`` over the objective and ``kv_share``."""
    shared_tbt_s: float = math.inf
    """The part of it that the requests of a batch share, such as reading the weights; all of it, at most."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf and field.name != "shared_tbt_s":
                raise InvalidInput(f"{field.name} is {getattr(self, field.name):g}; expected 0 or more")
        if not self.shared_tbt_s >= 0:
            raise InvalidInput(f"shared_tbt_s is {self.shared_tbt_s:g}; expected 0 or more")
        if not (self.high > 0 and self.low > 0 and self.most_drain_s > 0):
            raise InvalidInput("high, low and most_drain_s: expected above 0")
        if self.margin == 0:
            raise InvalidInput("margin is 0; expected above 0: without it an instance may go back and forth")


class PoolController:
    """Decides role changes. Not thread-safe.

    Raises:
        InvalidInput: an objective that even an idle decode instance does not meet.
    """

    def __init__(self, slo: Slo, settings: ElasticSettings | None = None) -> None:
        self.settings = settings = settings or ElasticSettings()
        if settings.idle_tbt_s >= slo.tbt_s:
            raise InvalidInput(
                f"idle_tbt_s is {settings.idle_tbt_s:g} s; expected below the objective between tokens, {slo.tbt_s:g} s"
            )
        self._slo = slo
        self.idle_tbt_s = settings.idle_tbt_s
        self.shared_tbt_s = settings.shared_tbt_s
        """As in the settings; a caller that measures them may set both, the first below the objective."""
        self._needs: dict[Role, _Smoothed] = {role: _Smoothed(settings.smoothing_s) for role in ROLES}
        self._demands: dict[Role, _Smoothed] = {role: _Smoothed(settings.smoothing_s) for role in ROLES}
        self._serving: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._last_s: float | None = None
        self._next_s = -math.inf
        """Time from which a change may begin."""
        self._empty_s: dict[Role, float | None] = dict.fromkeys(ROLES)
        """Since when a pool has no serving instance."""
        self._change: RoleChange | None = None
        self._begun_s = 0.0

    @property
    def under_way(self) -> RoleChange | None:
        """The change that has begun and not ended."""
        return self._change

    def load(self, role: Role) -> float:
        """The pool's load; infinite without a serving instance, 0 before the first sample."""
        serving, demand = self._serving[role], self._demands[role].value
        return demand / serving if serving else math.inf if self._last_s is not None else 0.0

    def need(self, role: Role) -> float:
        """How far its requests are from their objective, which is 1; 0 before the first sample."""
        return self._needs[role].value

    def observe(self, instances: Sequence[InstanceSample], now_s: float) -> RoleChange | None:
        """All instances as of now; returns a change to begin or to call off.

        Raises:
            InvalidInput: ``now_s`` before that of the last call, or two instances of one name.
        """
        by_name = {one.name: one for one in instances}
        if len(by_name) < len(instances):
            raise InvalidInput("two instances of one name; names must differ")
        if self._last_s is None:
            self._last_s, self._next_s = now_s, now_s + self.settings.settle_s
        if now_s < self._last_s:
            raise InvalidInput(
                f"an observation at {now_s:g} s after one at {self._last_s:g} s; expected none before it"
            )
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        for role in ROLES:
            ours = [one for one in instances if one.role == role and one.state != "down"]
            self._demands[role].add(sum(map(self._demand, ours)), elapsed_s)
            serving = [one for one in ours if one.state == "serving"]
            self._serving[role] = len(serving)
            # An instance that decodes nothing counts as much as one request: a pool without work has no need.
            counts = [1 if role == "prefill" else max(1, one.in_flight) for one in serving]
            self._needs[role].add(
                sum(count * self._need(one) for one, count in zip(serving, counts, strict=True)),
                elapsed_s,
                sum(counts),
            )
            if self._serving[role]:
                self._empty_s[role] = None
            elif self._empty_s[role] is None:
                self._empty_s[role] = now_s
        if self._change is not None:
            return self._follow(self._change, by_name.get(self._change.instance), now_s)
        return self._begin(instances, now_s)

    def _need(self, one: InstanceSample) -> float:
        if one.role == "prefill":
            return TAIL * one.queue_s / self._slo.ttft_s
        if not self.idle_tbt_s:
            return max(one.tbt_s / self._slo.tbt_s, one.kv_share)
        rate = 1 - self.idle_tbt_s / one.tbt_s if one.tbt_s > self.idle_tbt_s else 0.0
        return max(rate / self._most_rate, one.kv_share)

    def _demand(self, one: InstanceSample) -> float:
        if one.role == "prefill":
            return max(float(one.queue_s > 0), one.queue_s / self._slo.ttft_s)
        shared_s, share = min(self.shared_tbt_s, self.idle_tbt_s), one.kv_share
        if not one.tbt_s or not self.idle_tbt_s or share > 1:
            return max(one.tbt_s / self._slo.tbt_s, share)
        shared = min(1.0, shared_s / one.tbt_s)
        return max((1 - shared) / self._most_rate, 1 - (1 - share) * shared)

    @property
    def _most_rate(self) -> float:
        """Tokens a second of a decode instance at the objective, as a share of those of an endless batch."""
        return 1 - self.idle_tbt_s / self._slo.tbt_s

    def _follow(self, change: RoleChange, one: InstanceSample | None, now_s: float) -> RoleChange | None:
        """Ends the change when its instance has its new role, is gone, takes too long, or is needed where it is."""
        back, drain_s = other(change.role), now_s - self._begun_s
        # One that serves in its old role was called off by the caller, such as by an operator.
        over = one is None or one.role == change.role or one.state == "serving"
        reason = ""
        if one is not None and not over:
            if drain_s > self.settings.most_drain_s:
                reason = f"it has not been {change.role} after {drain_s:.0f} s, {one.in_flight} requests in flight"
            elif one.state == "draining" and not self._serving[back]:
                reason = f"no other {back} instance serves any more"
        if not over and not reason:
            return None
        self._change = None
        self._next_s = now_s + self.settings.settle_s + self.settings.drain_weight * drain_s
        return RoleChange(change.instance, back, reason) if reason else None

    def _begin(self, instances: Sequence[InstanceSample], now_s: float) -> RoleChange | None:
        for to in ROLES:
            giver = other(to)
            serving = self._serving[giver]
            if serving < 2:
                continue
            reason = self._orphaned(to, now_s)
            if reason is None and now_s >= self._next_s:
                reason = self._helps(to)
            if reason is None:
                continue
            # What drains soonest. For equal ones the last named: callers name the first ones first in the pool.
            candidates = [
                one for one in reversed(instances) if (one.role, one.state, one.fixed) == (giver, "serving", False)
            ]
            if not candidates:
                continue
            chosen = min(candidates, key=lambda one: (one.queue_s, one.in_flight, one.kv_share))
            self._change, self._begun_s = RoleChange(chosen.name, to, reason), now_s
            return self._change
        return None

    def _orphaned(self, to: Role, now_s: float) -> str | None:
        """A pool without instances serves nothing: it gets one whatever the loads are, once that has lasted."""
        since_s = self._empty_s[to]
        if since_s is None or now_s - since_s < self.settings.settle_s:
            return None
        return f"no {to} instance has served for {now_s - since_s:.0f} s"

    def _helps(self, to: Role) -> str | None:
        """Why an instance should change to this role; None: it should not."""
        settings, giver = self.settings, other(to)
        if not self._serving[to]:
            return None
        growth = min(1 + 1 / self._serving[to], MOST_GROWTH)
        left = self._demands[giver].value / (self._serving[giver] - 1) * growth
        need, load = self.need(to), self.load(to)
        if need < settings.high or left > settings.low or left * (1 + settings.margin) > load:
            return None
        if self._need_with(giver, left) > 1:
            return None
        return f"{to} is at {need:.2f} of its objective; {giver} would have a load of {left:.2f} with one instance less"

    def _need_with(self, role: Role, load: float) -> float:
        """The need of a pool that prefills with another load than now; of one that decodes the load says it all."""
        now = self.load(role)
        if role == "decode" or not 0 < now < 1:
            return 0.0
        return self.need(role) * (load / now) * (1 - now) / (1 - load) if load < 1 else math.inf


class _Smoothed:
    """A mean over time with exponential weights. At the beginning it is the plain mean of what there is."""

    def __init__(self, time_constant_s: float) -> None:
        self._constant_s = time_constant_s
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, total: float, elapsed_s: float, count: float = 1.0) -> None:
        """``total`` of ``count`` samples: for the time since those before; the first, without any, for a moment."""
        keep = math.exp(-elapsed_s / self._constant_s) if self._constant_s else 0.0
        share = max(1 - keep, 1e-9)
        self._sum = self._sum * keep + total * share
        self._weight = self._weight * keep + count * share
