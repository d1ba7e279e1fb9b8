"""The books of requests that two servers share: whatever happens to either, nothing stays open; no sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http.pairs import no_batch_is_open

from skymemory.conductor.admission.goodput import Goodput
from skymemory.conductor.cost_model import PRESETS
from skymemory.conductor.picker import Fleet, NoServer, Picker
from skymemory.conductor.request import Prompt, Request, Slo
from skymemory.conductor.scheduler import Admission, Refusal, ScheduledRequest, Scheduler
from skymemory.conductor.scheduling.decode import LeastTbt
from skymemory.conductor.strategies.registry import named
from skymemory.router.request_account import PairAccount, Usage

NONE = np.empty(0, dtype=np.uint64)
COST = PRESETS["llama-70b-8xa800"]
LENGTHS = (10, 5_000)
EVENTS = ("prefilled", "prefill lost", "prefill again", "decode again", "first byte", "ended", "failed", "closed")


class Log(Admission):
    """What the admission rule is notified of; ``refuses``: decoding."""

    name = "log"

    def __init__(self, refuses: bool = False) -> None:
        self.events: list[str] = []
        self.refuses = refuses

    def before_decode(self, placement: ScheduledRequest, now_s: float) -> Refusal | None:
        self.events.append("asked")
        return Refusal("too slow", 3.0, kind="tbt") if self.refuses else None

    def accepted(self, placement: ScheduledRequest, now_s: float) -> None:
        self.events.append("accepted")

    def prefilled(self, placement: ScheduledRequest, now_s: float) -> None:
        self.events.append("prefilled")

    def on_request_end(self, placement: ScheduledRequest, now_s: float, met: bool | None) -> None:
        self.events.append(f"ended {met}")


def some(rule: Admission) -> Scheduler:
    prefill, decode = Fleet(), Fleet()
    for number in range(2):
        prefill.add(f"p{number}")
        decode.add(f"d{number}")
    forecast = LeastTbt(COST, decode)
    return Scheduler(Picker(prefill, named(cost=COST)), Picker(decode, forecast), rule, forecast)


def begun(scheduler: Scheduler, tokens: int = 100, now_s: float = 0.0) -> PairAccount:
    placed = scheduler.place(Request(Prompt(NONE, NONE, 16.0, tokens)), now_s)
    assert isinstance(placed, ScheduledRequest)
    return PairAccount(scheduler, placed, now_s)


def loads(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    assert scheduler.decode is not None
    fleets = (scheduler.prefill.fleet, scheduler.decode.fleet)
    return {each.name: (each.in_flight, each.prefilling) for fleet in fleets for each in fleet if each.in_flight}


def test_each_server_has_it_as_long_as_it_works_on_it() -> None:
    log = Log()
    scheduler = some(log)
    account = begun(scheduler)
    p, d = account.prefill.server, account.decision.server
    assert loads(scheduler) == {p: (1, 1), d: (1, 1)}
    assert account.prefilled(1.0, Usage(100, 60)) is None
    assert loads(scheduler) == {d: (1, 1)}
    account.first_byte(2.0)
    assert loads(scheduler) == {d: (1, 0)}
    account.on_request_end(3.0, Usage(100, 0, 7), True)
    assert not loads(scheduler) and log.events == ["accepted", "prefilled", "asked", "ended True"]
    account.close(4.0)
    assert len(log.events) == 4


def test_a_refusal_after_the_prefill_ends_both() -> None:
    log = Log(refuses=True)
    scheduler = some(log)
    account = begun(scheduler)
    refusal = account.prefilled(1.0)
    assert refusal is not None and refusal.computed and not loads(scheduler)
    account.close(2.0)
    assert log.events == ["accepted", "prefilled", "asked", "ended None"]


def test_what_decodes_already_is_not_asked_whether_it_may() -> None:
    log = Log(refuses=True)
    scheduler = some(log)
    account = begun(scheduler)
    account.first_byte(1.0)
    assert account.prefilled(2.0) is None
    account.on_request_end(3.0)
    assert log.events == ["accepted", "prefilled", "ended None"] and not loads(scheduler)


def test_one_server_is_replaced_and_the_other_keeps_it() -> None:
    scheduler = some(Log())
    account = begun(scheduler)
    p, d = account.prefill.server, account.decision.server
    others = {"p0": "p1", "p1": "p0", "d0": "d1", "d1": "d0"}
    account.prefill_again(1.0, {others[p]})
    assert loads(scheduler) == {others[p]: (1, 1), d: (1, 1)}
    assert account.prefilled(2.0) is None
    account.decode_again(3.0, {others[d]})
    assert loads(scheduler) == {others[d]: (1, 1)}
    account.first_byte(4.0)
    account.close(5.0)
    assert not loads(scheduler)


happenings = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(EVENTS), st.integers(0, 3)), max_size=40)


@given(happenings, st.booleans())
def test_whatever_happens_in_the_end_nothing_is_in_flight(
    happenings: list[tuple[int, str, int]], refuses: bool
) -> None:
    for rule in (Goodput(Slo(30.0, 0.1)), Log(refuses)):
        scheduler, now_s = some(rule), 0.0
        accounts = [begun(scheduler, LENGTHS[number % 2]) for number in range(6)]
        for number, event, draw in happenings:
            now_s += 0.5
            happen(accounts[number], event, draw, now_s)
        for account in accounts:
            account.close(now_s + 1.0)
        assert not loads(scheduler)
        assert scheduler.decode is not None and isinstance(scheduler.decode.scorer, LeastTbt)
        assert no_batch_is_open(scheduler.decode.scorer)
        assert all(each.prefill_tokens == 0.0 for each in scheduler.prefill.fleet)
        if isinstance(rule, Log):
            assert rule.events.count("accepted") == sum(each.startswith("ended") for each in rule.events) == 6
        else:
            assert rule._batches.tokens == 0 and rule._batches._inside == 0 and not rule._late


def happen(account: PairAccount, event: str, draw: int, now_s: float) -> None:
    among = (None, (), {"p0", "d0"}, {"p1", "d1"})[draw]
    usage = (None, Usage(100, None), Usage(100, 40), Usage(100, 40, 8))[draw]
    calls: dict[str, Callable[[], Any]] = {
        "prefilled": lambda: account.prefilled(now_s, usage),
        "prefill lost": lambda: account.prefill_lost(now_s),
        "first byte": lambda: account.first_byte(now_s),
        "ended": lambda: account.on_request_end(now_s, usage, (None, True, False, True)[draw]),
        "failed": lambda: account.failed(now_s),
        "closed": lambda: account.close(now_s),
    }
    if event in calls:
        calls[event]()
        return
    try:
        if event == "prefill again" and account.is_open and account._is_prefilling:
            account.prefill_again(now_s, among)
        elif event == "decode again" and account.is_open:
            account.decode_again(now_s, among)
    except NoServer:
        assert among == ()
