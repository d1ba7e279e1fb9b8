"""Role changes in elastic pools, as the conductor's controller decides."""

from __future__ import annotations

from skymemory.conductor.picker import Fleet
from skymemory.conductor.pools import InstanceSample, PoolController, Role, RoleChange, State, other
from skymemory_lab.sim.clock import Clock
from skymemory_lab.sim.cluster.machines import Machines
from skymemory_lab.sim.cluster.outcome import RoleSpan
from skymemory_lab.sim.cluster.setup import ClusterSetup


class Roles:
    """Executor of role changes, one instance at a time.

    1. The instance is closed in its fleet; it still serves earlier requests.
    2. After its last request its accelerators are set up for the other role, for ``change_s``.
    3. It is opened in the other fleet. Its memory keeps its KV.
    """

    def __init__(self, setup: ClusterSetup, clock: Clock, machines: Machines) -> None:
        self._clock, self._machines, self._change_s = clock, machines, setup.change_s
        self._controller = PoolController(setup.slo, setup.elastic_settings())
        self._closed: str | None = None
        # Number of the current change; the set-up of a cancelled change has no effect.
        self._attempt = 0
        self._empty = False  # true while the drained instance is being set up
        self.spans: list[RoleSpan] = []
        self._since_s: dict[str, float] = {}
        for name, role in machines.role.items():
            self._fleet(other(role)).servers[name].draining = True

    def observe(self, now_s: float) -> None:
        # Set up the drained instance, and show samples of all to the controller, which may want a change.
        closed = self._closed
        if closed is not None and not self._empty and closed not in self._machines.down and self._drained(closed):
            self._empty, attempt = True, self._attempt
            self._clock.at(now_s + self._change_s, lambda at_s: self._open(closed, attempt, at_s))
        samples = [self._sample(name, now_s) for name in self._machines.prefill_names]
        for sample in samples:
            self._since_s.setdefault(sample.name, now_s)
        wanted = self._controller.observe(samples, now_s)
        if wanted is not None:
            self._carry_out(wanted)

    def end(self, now_s: float) -> None:
        for name, since_s in self._since_s.items():
            self.spans.append(RoleSpan(name, self._machines.role[name], since_s, now_s))

    def _carry_out(self, wanted: RoleChange) -> None:
        # Close the instance in its fleet; if its present role is wanted, open it again.
        name, role = wanted.instance, self._machines.role[wanted.instance]
        self._attempt, self._empty = self._attempt + 1, False
        self._closed = None if wanted.role == role else name
        self._fleet(role).servers[name].draining = self._closed is not None

    def _open(self, name: str, attempt: int, now_s: float) -> None:
        if attempt != self._attempt:
            return
        machines, before = self._machines, self._machines.role[name]
        if name in machines.down:  # the instance failed during its set-up, which starts again when it returns
            self._empty = False
            return
        self.spans.append(RoleSpan(name, before, self._since_s[name], now_s))
        machines.role[name], self._since_s[name] = other(before), now_s
        self._fleet(machines.role[name]).servers[name].draining = False
        self._closed, self._empty = None, False

    def _drained(self, name: str) -> bool:
        # A request counts for its decode instance from its placement on, before its KV arrives.
        return self._fleet(self._machines.role[name]).servers[name].in_flight == 0

    def _sample(self, name: str, now_s: float) -> InstanceSample:
        machines, role = self._machines, self._machines.role[name]
        server = self._fleet(role).servers[name]
        state: State = "down" if name in machines.down else "draining" if name == self._closed else "serving"
        if role == "prefill":
            queue_s = machines.prefills[server.slot].backlog_s(now_s)
            return InstanceSample(name, role, state, queue_s=queue_s, in_flight=server.in_flight)
        decode = machines.decodes[server.slot]
        return InstanceSample(
            name,
            role,
            state,
            tbt_s=decode.step_s(now_s),
            kv_share=decode.needed_share(),
            in_flight=server.in_flight,
        )

    def _fleet(self, role: Role) -> Fleet:
        return self._machines.prefill_fleet if role == "prefill" else self._machines.decode_fleet
