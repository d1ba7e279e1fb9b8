"""How long requests would wait: compiled and twin, against each other and in cases worked out by hand."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.conductor.strategies.fleets import a_fleet
from tests.native.conftest import IMPLEMENTATIONS

from skymemory.conductor.picker import ReportedLoad


def test_a_queue_shrinks_with_time_and_with_answers(impl: ModuleType) -> None:
    fleet = a_fleet(2)
    servers = list(fleet)
    queues = impl.PrefillQueues(overdue=0.1)
    assert queues.waits_s(servers, 0.0) == [0.0, 0.0]
    first, second = queues.add(0, 2.0, 10.0), queues.add(0, 3.0, 10.5)
    assert queues.waits_s(servers, 10.5) == [4.5, 0.0]
    assert queues.waits_s(servers, 11.0)[0] == pytest.approx(4.0)
    # Two seconds over: it still needs a tenth of its time so far.
    assert queues.waits_s(servers, 14.0)[0] == pytest.approx(3.0 + 0.4)
    assert queues.remove(0, first, 14.0) == pytest.approx(4.0)
    assert queues.waits_s(servers, 15.0)[0] == pytest.approx(2.0)
    assert queues.remove(0, second, 16.0) == pytest.approx(2.0), "since the one before it ended"
    assert queues.waits_s(servers, 16.0) == [0.0, 0.0]
    assert queues.remove(0, second, 17.0) is None
    third = queues.add(0, 1.0, 100.0)
    assert queues.waits_s(servers, 100.5)[0] == pytest.approx(0.5)
    queues.forget(0)
    assert queues.waits_s(servers, 100.5)[0] == 0.0 and queues.remove(0, third, 101.0) is None


def test_answers_out_of_turn_leave_the_first_where_it_is(impl: ModuleType) -> None:
    fleet = a_fleet(1)
    queues = impl.PrefillQueues(overdue=0.0)
    first, second, _ = queues.add(0, 4.0, 0.0), queues.add(0, 1.0, 0.0), queues.add(0, 2.0, 0.0)
    queues.remove(0, second, 2.0)
    assert queues.waits_s(list(fleet), 3.0) == [3.0]
    queues.remove(0, first, 4.0)
    assert queues.waits_s(list(fleet), 4.5) == [1.5]


def test_requests_that_others_sent_wait_too_and_ours_are_not_counted_twice(impl: ModuleType) -> None:
    fleet = a_fleet(2)
    servers = list(fleet)
    queues = impl.PrefillQueues(overdue=0.0)
    first, _ = queues.add(0, 2.0, 10.0), queues.add(0, 2.0, 10.0)
    servers[0].reported = ReportedLoad(at_s=10.5, waiting=2)
    servers[1].reported = ReportedLoad(at_s=10.5, waiting=3)
    assert queues.waits_s(servers, 10.5) == [3.5, 6.0]
    # One of ours was answered since the report: the report still counts it, and we know of it.
    servers[0].reported = ReportedLoad(at_s=11.0, waiting=2)
    queues.remove(0, first, 12.0)
    assert queues.waits_s(servers, 12.0) == [2.0, 6.0]
    servers[0].reported = ReportedLoad(at_s=12.0, waiting=4)
    assert queues.waits_s(servers, 12.0) == [2.0 + 3 * 2.0, 6.0]
    assert queues.waits_s(servers, 50.0)[1] == 0.0, "a report that old says nothing"


def test_a_prefill_whose_end_does_not_show_ends_when_its_time_is_over(impl: ModuleType) -> None:
    """Its answer comes whole, a minute later: no request behind it waits for that."""
    servers = list(a_fleet(1))
    queues = impl.PrefillQueues(overdue=0.1)
    first = queues.add(0, 2.0, 10.0, unseen=True)
    second = queues.add(0, 3.0, 10.5, unseen=True)
    assert queues.waits_s(servers, 11.0) == [4.0]
    assert queues.waits_s(servers, 13.0) == [2.0], "the first is done, and the second began behind it"
    third = queues.add(0, 1.0, 14.0)
    assert queues.waits_s(servers, 14.0) == [2.0] and queues.waits_s(servers, 15.5) == [0.5]
    assert queues.remove(0, third, 16.5) is None, "when it could begin is not known"
    assert queues.waits_s(servers, 16.5) == [0.0]
    assert queues.remove(0, first, 70.0) is None and queues.remove(0, second, 70.0) is None
    shown = queues.add(0, 1.0, 80.0)
    assert queues.remove(0, shown, 81.25) == 1.25


def test_a_report_and_an_answer_say_that_those_before_it_are_done(impl: ModuleType) -> None:
    servers = list(a_fleet(1))
    queues = impl.PrefillQueues(overdue=0.1)
    sent = [queues.add(0, 10.0, 0.0, unseen=True) for _ in range(4)]
    assert queues.waits_s(servers, 1.0) == [39.0]
    servers[0].reported = ReportedLoad(at_s=2.0, waiting=1, running=3)
    assert queues.waits_s(servers, 2.0) == [20.0], "one is computed and one waits"
    assert queues.waits_s(servers, 4.0) == [18.0], "the same report says nothing new"
    queues.remove(0, sent[3], 5.0)
    assert queues.waits_s(servers, 5.0) == [0.0]


SECONDS = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5, 7.0])


class Alike(RuleBasedStateMachine):
    """Whatever is done to one is done to the other, and they answer to the last digit."""

    def __init__(self) -> None:
        super().__init__()
        self.queues = [module.PrefillQueues(0.1) for module in IMPLEMENTATIONS]
        self.servers = list(a_fleet(3))
        self.sent: list[tuple[int, list[int]]] = []
        self.now_s = 10.0

    def agreed(self, answers: list[object]) -> object:
        assert all(one == answers[0] for one in answers), answers
        return answers[0]

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(slot=st.integers(0, 2), work_s=SECONDS, drain_s=st.sampled_from([0.0, 0.0, 0.7]), unseen=st.booleans())
    def add(self, slot: int, work_s: float, drain_s: float, unseen: bool) -> None:
        tickets = [queues.add(slot, work_s, self.now_s, drain_s, unseen=unseen) for queues in self.queues]
        self.sent.append((slot, tickets))

    @rule(which=st.integers(0, 20), elsewhere=st.booleans(), keep=st.booleans())
    def remove(self, which: int, elsewhere: bool, keep: bool) -> None:
        if self.sent:
            slot, tickets = self.sent[which % len(self.sent)]
            if not keep:
                del self.sent[which % len(self.sent)]
            slot = (slot + elsewhere) % 3
            pairs = zip(self.queues, tickets, strict=True)
            self.agreed([queues.remove(slot, ticket, self.now_s) for queues, ticket in pairs])

    @rule(which=st.integers(0, 2), ago_s=SECONDS, waiting=st.integers(0, 4))
    def report(self, which: int, ago_s: float, waiting: int) -> None:
        self.servers[which].reported = ReportedLoad(self.now_s - ago_s, waiting)

    @rule(which=st.integers(0, 2))
    def report_nothing(self, which: int) -> None:
        self.servers[which].reported = None

    @rule(slot=st.integers(0, 2))
    def forget(self, slot: int) -> None:
        for queues in self.queues:
            queues.forget(slot)

    @invariant()
    def waits(self) -> None:
        self.agreed([queues.usual_s for queues in self.queues])
        self.agreed([queues.waits_s(self.servers, self.now_s) for queues in self.queues])


Alike.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestAlike = Alike.TestCase


def test_servers_and_slots_that_are_none_are_refused(impl: ModuleType) -> None:
    queues = impl.PrefillQueues(0.1)
    for slot in (-1, 65536):
        with pytest.raises(ValueError):
            queues.add(slot, 1.0, 0.0)
        with pytest.raises(ValueError):
            queues.remove(slot, 1, 0.0)
    with pytest.raises(AttributeError):
        queues.waits_s([object()], 0.0)
    assert queues.remove(5, 1, 0.0) is None and queues.waits_s([], 0.0) == []
