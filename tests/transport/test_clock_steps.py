"""Wall clocks that are set while a constellation runs: commands of all parties pass within seconds, no replay does.

Five hosts on two computers (four and one), ground computers, and every combination of steps of their wall clocks, in
virtual time. A host is its clock, its keys and the gate of one of its satellites.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest

from skymemory.constellation.torus import SatelliteId
from skymemory.keys import first_ring
from skymemory.metrics import Counters
from skymemory.protocol.auth import ALONE_S, MAX_SKEW_S, Authority, SatelliteGate
from skymemory.protocol.wire import Address, LinkEnd, Op, SkyHeader, build_packet, single
from skymemory.transport.unix_clock import UnixClock

RING = first_ring(bytes(range(32)))
DAY_S = 86_400.0
STEPS_S = (-DAY_S, -40.0, 0.0, 40.0, DAY_S)
HOSTS = 5
SERVED_WITHIN_S = 10


class Time:
    """What passes everywhere."""

    def __init__(self) -> None:
        self.passed_s = 0.0


@dataclass
class Computer:
    """Its wall clock can be set; its running clock cannot, and began at a time of its own."""

    time: Time
    began_s: float
    wall_ahead_s: float = 0.0
    unix_at_boot_s: float | None = None

    def running_s(self) -> float:
        return self.began_s + self.time.passed_s

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.time.passed_s + self.wall_ahead_s

    def record_clock(self) -> None:
        """As ``constellation up`` and ``attach`` do."""
        self.unix_at_boot_s = self.wall_s() - self.running_s()

    def clock(self) -> UnixClock:
        clock = UnixClock(self.wall_s, self.running_s)
        clock.count_from(self.unix_at_boot_s)
        return clock


class Party:
    """A process of a computer that signs commands: a client, or one satellite of a host."""

    def __init__(self, computer: Computer, ground: int) -> None:
        self.clock, self.authority, self.ground = computer.clock(), Authority(RING), ground
        self.address, self.sequence = Address(0, 0), 0

    def command(self, to: Host) -> bytes:
        self.authority.wall_shift_s = self.clock.wall_shift_s()
        self.sequence = self.sequence + 1 & 0x3FFF
        now_s, source = self.clock.now_s(), to.beam if self.ground else self.address
        header = SkyHeader(Op.PING, to.address, source, self.ground, 1, timestamp_us=int(now_s * 1e6) & 0xFFFFFFFF)
        return bytes(self.authority.sign(single(build_packet(header, b"", self.sequence, now_s)), now_s).headers)

    @property
    def link(self) -> LinkEnd:
        return ("ground", self.ground) if self.ground else SatelliteId(self.address.plane, self.address.slot)


class Host(Party):
    def __init__(self, computer: Computer, number: int) -> None:
        super().__init__(computer, ground=0)
        self.address, self.beam = Address(number, 0), Address(number, 0, 0xFF)
        self.refused = False
        self.counters = Counters()
        now_s = self.clock.now_s()
        self.gate = SatelliteGate(self.authority, self.address, self.counters, self._refuse, now_s)

    def _refuse(self, packet: memoryview, source: LinkEnd, now_s: float) -> None:
        self.refused = True

    def beat(self) -> None:
        """As ``UdpHost._look_at_wall_clock``, ten times a second."""
        if self.authority.heard_by_wall:
            self.clock.follow_wall()
        self.authority.heard_by_wall, self.authority.wall_shift_s = False, self.clock.wall_shift_s()

    def admits(self, packet: bytes, source: LinkEnd) -> bool:
        self.refused = False
        runs, _ = self.gate.admit([(memoryview(packet), len(packet))], source, self.clock.now_s())
        return bool(runs)


@dataclass
class World:
    time: Time = field(default_factory=Time)
    recorded: list[tuple[Host, LinkEnd, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.four, self.fifth, self.elsewhere = (Computer(self.time, began_s) for began_s in (50.0, 7_000.0, 900.0))
        for computer in (self.four, self.fifth, self.elsewhere):
            computer.record_clock()
        self.hosts = [Host(self.fifth if number == 4 else self.four, number) for number in range(HOSTS)]
        self.clients = [self.client(self.four), self.client(self.elsewhere)]

    def client(self, computer: Computer) -> Party:
        ground = getattr(self, "_grounds", 0) + 1
        self._grounds = ground
        return Party(computer, ground)

    def passes(self, seconds: float) -> None:
        pieces = min(max(1, round(seconds)), 60)
        for _ in range(pieces):
            self.time.passed_s += seconds / pieces
            for host in self.hosts:
                host.beat()

    def reaches(self, sender: Party, host: Host) -> bool:
        """Whether one command of the sender passes; a client learns of a refusal."""
        packet = sender.command(host)
        self.recorded.append((host, sender.link, packet))
        passed = host.admits(packet, sender.link)
        if host.refused and sender.ground:
            sender.authority.on_refused(sender.clock.now_s())
        return passed

    def all_reached(self) -> bool:
        """Every client reaches every host, every host every other."""
        senders = (*self.clients, *self.hosts)
        reached = [self.reaches(sender, host) for sender in senders for host in self.hosts if host is not sender]
        return all(reached)

    def becomes_whole(self) -> bool:
        for _ in range(SERVED_WITHIN_S):
            if self.all_reached():
                return True
            self.passes(1.0)
        return self.all_reached()

    def replayed(self) -> int:
        """How many of all packets so far pass again."""
        return sum(host.admits(packet, source) for host, source, packet in self.recorded if host in self.hosts)


@pytest.mark.brief(every=5)
@pytest.mark.parametrize(
    "steps_s", product(STEPS_S, repeat=3), ids=lambda steps_s: "/".join(f"{step_s:+.0f}" for step_s in steps_s)
)
def test_all_parties_are_served_after_any_steps_and_no_replay_is(steps_s: tuple[float, float, float]) -> None:
    """Of the wall clocks of four hosts, of the fifth, and of the clients elsewhere."""
    world = World()
    for _ in range(3):
        world.passes(2.0)
        assert world.all_reached()
    for computer, step_s in zip((world.four, world.fifth, world.elsewhere), steps_s, strict=True):
        computer.wall_ahead_s += step_s
    # Clients that start after the step, and a host that is started again: by the clock of before.
    world.clients += [world.client(world.four), world.client(world.elsewhere)]
    world.passes(1.0)
    assert world.becomes_whole()
    assert world.replayed() == 0
    world.hosts[1] = Host(world.four, 1)
    world.passes(1.0)
    assert world.becomes_whole()
    for seconds in (1.0, 9.0, 20.0, 40.0, DAY_S):
        world.passes(seconds)
        assert world.replayed() == 0


@pytest.mark.parametrize("step_s", [40.0, DAY_S])
def test_hosts_follow_a_wall_clock_set_forward_once_they_hear_no_client_by_the_old_time(step_s: float) -> None:
    """As after the pause of a virtual machine: all others count by the wall clock. One day a host hears both."""
    world = World()
    world.passes(2.0)
    assert world.all_reached()
    for computer in (world.four, world.fifth, world.elsewhere):
        computer.wall_ahead_s += step_s
    stranger = Computer(world.time, 3.0, step_s)  # right, and has never recorded a clock
    later = world.client(stranger)
    world.passes(1.0)
    before_s = [host.clock.now_s() for host in world.hosts]
    assert all(world.reaches(later, host) for host in world.hosts), "at once: by the wall clock"
    world.passes(1.0)
    assert [host.clock.now_s() for host in world.hosts] == pytest.approx([time_s + 1.0 for time_s in before_s])
    world.passes(ALONE_S)
    assert all(world.reaches(later, host) for host in world.hosts)
    world.passes(1.0)
    assert all(abs(host.clock.now_s() - host.clock._wall()) < 1.0 for host in world.hosts)
    assert world.becomes_whole(), "clients of before sign by their wall clocks when they are refused"
    assert world.replayed() == 0


@pytest.mark.brief()
def test_a_client_without_a_recorded_clock_is_served_after_the_wall_clock_was_set_back() -> None:
    """By the hosts' wall clock, as far back as the hosts remember all commands: not before their start."""
    world = World()
    for _ in range(20):
        world.passes(5.0)
        assert world.all_reached()
    for computer in (world.four, world.fifth):
        computer.wall_ahead_s -= 40.0
    world.passes(1.0)
    later = world.client(Computer(world.time, 3.0, -40.0))
    assert all(world.reaches(later, host) for host in world.hosts)
    assert world.replayed() == 0
    for _ in range(90):
        world.passes(1.0)
        assert world.replayed() == 0


def test_a_host_refuses_what_was_made_before_its_start_by_its_wall_clock_too() -> None:
    """A host that was started again knows no command of before: a wall clock set back must not make them new."""
    world = World()
    world.passes(3.0)
    assert world.all_reached()
    world.passes(2.0)
    world.hosts = [Host(world.four, number) for number in range(HOSTS)]
    world.recorded = [(world.hosts[host.address.plane], source, packet) for host, source, packet in world.recorded]
    for step_s in (-5.0, -35.0, 10.0, 60.0, -DAY_S):
        world.four.wall_ahead_s += step_s
        world.passes(1.0)
        assert world.replayed() == 0


@pytest.mark.parametrize("off_s", [-MAX_SKEW_S - 1, MAX_SKEW_S + 1, DAY_S])
def test_a_client_that_starts_by_a_wrong_clock_of_its_own_is_refused(off_s: float) -> None:
    world = World()
    wrong = world.client(Computer(world.time, 3.0, off_s))
    for _ in range(SERVED_WITHIN_S):
        world.passes(1.0)
        assert not any(world.reaches(wrong, host) for host in world.hosts)


def test_a_host_that_starts_by_a_wrong_clock_says_that_it_refuses() -> None:
    """Not a word would be taken for its death: its wall clock, which is right, is from before its start."""
    world = World()
    world.passes(5.0)
    world.four.unix_at_boot_s += 3_600.0
    world.hosts[1] = wrong = Host(world.four, 1)
    world.passes(1.0)
    for client in world.clients:
        assert not world.reaches(client, wrong)
        assert wrong.refused and not wrong.counters.get("packets_replayed")
