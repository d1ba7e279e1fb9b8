"""Elastic pools: the load decides how many instances prefill and how many decode.

The caller samples its instances, calls ``PoolController.observe`` about once per second, and carries out the returned
change: it drains the instance and opens it in the other role.

Need is measured by time, spare capacity by work. Both are smoothed over time::

    need      prefill   TAIL · queue_s / ttft objective, the mean over instances
              decode    max((1 - idle / tbt_s) / (1 - idle / tbt objective), kv_share), the mean over requests
              1: at the objective

    demand    prefill   Σ max(1 if it has work, else 0, queue_s / ttft objective)
              decode    Σ max((1 - shared / tbt_s) / (1 - idle / tbt objective), 1 - (1 - kv_share) · shared / tbt_s)
              a number of instances, so it does not jump when an instance moves

    load      demand / serving instances; 1: no more work fits within the objective

A batch of ``n`` takes ``tbt = shared + c·n`` per step and makes ``(1 - shared / tbt) / c`` tokens per second. Decode
demand is this rate over that at the objective (``idle / (1 - c · rate)`` between tokens) or with full memory (a batch
of ``n / kv_share``). ``tbt`` itself is not proportional to work.

An instance moves from pool G to pool R if all of these hold:

1. ``need(R) ≥ high``.
2. ``load_after = demand(G) / (serving(G) - 1) · growth ≤ low``. ``growth`` is ``1 + 1 / serving(R)``, at most
   ``MOST_GROWTH``: a larger R sends more work through both pools. If G prefills, its need after the move is at most 1,
   too; a queue at load ρ is ``ρ / (1 - ρ)`` times a factor that a move does not change.
3. ``load_after · (1 + margin) ≤ load(R)``.
4. G keeps an instance. If the others fail during the drain, it is called off.
5. No change is under way, and ``settle_s`` plus ``drain_weight`` times the last drain have passed since it ended.

Rule 3 is the hysteresis: with constant demands no move is undone. Mooncake's prefill and decode loads swing in
opposition; reacting to the lagging pool feeds the swing, which smoothing, rule 2 and ``settle_s`` prevent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from skymemory.conductor.request import Slo
from skymemory.errors import InvalidInput

TAIL = 3.0
"""Multiple of the mean that 5 % of exponential waits exceed: ``exp(-3)``."""
MOST_GROWTH = 1.25
"""Limit of ``growth``: doubling a pool rarely doubles the flow."""

Role = Literal["prefill", "decode"]
State = Literal["serving", "draining", "down"]
ROLES: tuple[Role, ...] = get_args(Role)
STATES: tuple[State, ...] = get_args(State)


def other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


@dataclass(frozen=True, slots=True)
class InstanceSample:
    name: str
    role: Role
    """While draining, the role that it gives up."""
    state: State = "serving"
    """``draining``: closed to new requests, for any reason. ``down``: neither serves nor drains."""
    fixed: bool = False
    """True if its role must not change."""
    queue_s: float = 0.0
    """Prefill: estimated seconds of queued work, including the current prefill."""
    tbt_s: float = 0.0
    """Decode: seconds between tokens; 0: idle."""
    kv_share: float = 0.0
    """Decode: KV memory needed, by waiting requests too, over its capacity."""
    in_flight: int = 0

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
    """Drain of ``instance`` into ``role``; if it still has ``role``, the end of its drain."""

    instance: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """Thresholds for moving instances between the prefill and the decode pool."""

    high: float = 0.85
    """Need from which a pool gets an instance."""
    low: float = 0.9
    """Largest load of the giving pool after the move."""
    margin: float = 0.1
    """Relative lead of the receiving pool's load over that, so that no move is undone."""
    smoothing_s: float = 20.0
    """Time constant of needs and demands."""
    settle_s: float = 20.0
    """Minimum time between changes, and before the first."""
    drain_weight: float = 0.5
    """Share of the last drain's duration that is added to ``settle_s``."""
    most_drain_s: float = 900.0
    """Maximum duration of a change; after it the instance serves in its old role again."""
    idle_tbt_s: float = 0.0
    """Seconds between tokens of a request that decodes alone; 0: unknown."""
    shared_tbt_s: float = math.inf
    """Part of ``idle_tbt_s`` that a batch shares, such as reading the weights."""

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
    """Controller of role changes. Not thread-safe.

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
        self._needs: dict[Role, _Smoothed] = {role: _Smoothed(settings.smoothing_s) for role in ROLES}
        self._demands: dict[Role, _Smoothed] = {role: _Smoothed(settings.smoothing_s) for role in ROLES}
        self._serving: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._last_s: float | None = None
        # No change begins before this time.
        self._next_s = -math.inf
        # Time since which a pool has had no serving instance.
        self._empty_s: dict[Role, float | None] = dict.fromkeys(ROLES)
        self._change: RoleChange | None = None
        self._begun_s = 0.0

    @property
    def under_way(self) -> RoleChange | None:
        return self._change

    def load(self, role: Role) -> float:
        """Return the demand per serving instance of ``role``; infinite without any."""
        serving, demand = self._serving[role], self._demands[role].value
        return demand / serving if serving else math.inf if self._last_s is not None else 0.0

    def need(self, role: Role) -> float:
        return self._needs[role].value

    def observe(self, instances: Sequence[InstanceSample], now_s: float) -> RoleChange | None:
        """Record the state of all instances; return a change to begin or to call off."""
        by_name = {instance.name: instance for instance in instances}
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
            ours = [instance for instance in instances if instance.role == role and instance.state != "down"]
            self._demands[role].add(sum(map(self._demand, ours)), elapsed_s)
            serving = [instance for instance in ours if instance.state == "serving"]
            self._serving[role] = len(serving)
            # An idle decode instance has the weight of one request, so that an idle pool has no need.
            counts = [1 if role == "prefill" else max(1, instance.in_flight) for instance in serving]
            self._needs[role].add(
                sum(count * self._need(instance) for instance, count in zip(serving, counts, strict=True)),
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

    def _need(self, instance: InstanceSample) -> float:
        # Return the latency relative to its objective (1: just met); for decode at least the KV memory in use.
        if instance.role == "prefill":
            return TAIL * instance.queue_s / self._slo.ttft_s
        if not self.idle_tbt_s:
            return max(instance.tbt_s / self._slo.tbt_s, instance.kv_share)
        rate = 1 - self.idle_tbt_s / instance.tbt_s if instance.tbt_s > self.idle_tbt_s else 0.0
        return max(rate / self._most_rate, instance.kv_share)

    def _demand(self, instance: InstanceSample) -> float:
        # Return how many instances at their objective would do this instance's work.
        if instance.role == "prefill":
            return max(float(instance.queue_s > 0), instance.queue_s / self._slo.ttft_s)
        # A batch of n takes tbt = shared + c·n per step and makes (1 - shared / tbt) / c tokens per second. The demand
        # is this rate over that at the objective, or with full memory (a batch of n / kv_share); tbt itself is not
        # proportional to work.
        shared_s, share = min(self.shared_tbt_s, self.idle_tbt_s), instance.kv_share
        if not instance.tbt_s or not self.idle_tbt_s or share > 1:
            return max(instance.tbt_s / self._slo.tbt_s, share)
        shared = min(1.0, shared_s / instance.tbt_s)
        return max((1 - shared) / self._most_rate, 1 - (1 - share) * shared)

    @property
    def _most_rate(self) -> float:
        return 1 - self.idle_tbt_s / self._slo.tbt_s

    def _follow(self, change: RoleChange, instance: InstanceSample | None, now_s: float) -> RoleChange | None:
        # Check the change under way; return its reversal if it takes too long or its old pool has failed.
        back, drain_s = other(change.role), now_s - self._begun_s
        # An instance that serves in its old role was called off by the caller, for example by an operator.
        over = instance is None or instance.role == change.role or instance.state == "serving"
        reason = ""
        if instance is not None and not over:
            if drain_s > self.settings.most_drain_s:
                reason = f"it has not been {change.role} after {drain_s:.0f} s, {instance.in_flight} requests in flight"
            elif instance.state == "draining" and not self._serving[back]:
                reason = f"no other {back} instance serves any more"
        if not over and not reason:
            return None
        self._change = None
        self._next_s = now_s + self.settings.settle_s + self.settings.drain_weight * drain_s
        return RoleChange(change.instance, back, reason) if reason else None

    def _begin(self, instances: Sequence[InstanceSample], now_s: float) -> RoleChange | None:
        # Begin a change, and return it, if a pool needs an instance that the other can spare.
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
            # The soonest to drain; among equal candidates the last in the caller's order.
            candidates = [
                instance
                for instance in reversed(instances)
                if (instance.role, instance.state, instance.fixed) == (giver, "serving", False)
            ]
            if not candidates:
                continue
            chosen = min(candidates, key=lambda instance: (instance.queue_s, instance.in_flight, instance.kv_share))
            self._change, self._begun_s = RoleChange(chosen.name, to, reason), now_s
            return self._change
        return None

    def _orphaned(self, to: Role, now_s: float) -> str | None:
        # Return the reason to refill a pool in which nothing has served for ``settle_s``.
        since_s = self._empty_s[to]
        if since_s is None or now_s - since_s < self.settings.settle_s:
            return None
        return f"no {to} instance has served for {now_s - since_s:.0f} s"

    def _helps(self, to: Role) -> str | None:
        # Return the reason to move an instance into pool ``to``, if ``to`` needs it more.
        settings, giver = self.settings, other(to)
        if not self._serving[to]:
            return None
        growth = min(1 + 1 / self._serving[to], MOST_GROWTH)
        load_after = self._demands[giver].value / (self._serving[giver] - 1) * growth
        need, load = self.need(to), self.load(to)
        if need < settings.high or load_after > settings.low or load_after * (1 + settings.margin) > load:
            return None
        if self._need_with(giver, load_after) > 1:
            return None
        return (
            f"{to} is at {need:.2f} of its objective; "
            f"{giver} would have a load of {load_after:.2f} with one instance less"
        )

    def _need_with(self, role: Role, load: float) -> float:
        # Return the prefill need at another ``load``; 0 for decode.
        now = self.load(role)
        if role == "decode" or not 0 < now < 1:
            return 0.0
        # A queue at load ρ is ρ / (1 - ρ) times a factor that a move does not change.
        return self.need(role) * (load / now) * (1 - now) / (1 - load) if load < 1 else math.inf


class _Smoothed:
    """Mean of samples that decay exponentially with time."""

    def __init__(self, time_constant_s: float) -> None:
        self._constant_s = time_constant_s
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, total: float, elapsed_s: float, count: float = 1.0) -> None:
        """Add the ``total`` of ``count`` samples, ``elapsed_s`` after the last call."""
        keep = math.exp(-elapsed_s / self._constant_s) if self._constant_s else 0.0
        share = max(1 - keep, 1e-9)
        self._sum = self._sum * keep + total * share
        self._weight = self._weight * keep + count * share
