"""What holds for all tests: which examples Hypothesis draws, and what it says of one that fails.

The default run draws the same examples on every machine and in every clone: from the code of the test itself, not from
a seed, and not from a database in which one clone keeps what failed there. ``make fuzz`` draws new ones (``fresh``)
and prints its seed; what it finds becomes an ``@example``. No example is bounded in time, which says more of the
machine than of us. ``make test`` draws the first of the same examples (profile ``brief``), as it always draws them.
"""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

for _name, _derandomize in (("same", True), ("brief", True), ("fresh", False)):
    settings.register_profile(
        _name,
        derandomize=_derandomize,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("same")

_BRIEF_SHARE, _BRIEF_LEAST = 0.25, 10
"""Of the examples of a property, and never less than so many."""
_MOST_WORKERS = 8
"""More than that gain nothing: each imports all that is tested before its first test."""
_WORKER_BYTES = 3 << 29
"""Of memory: torch and transformers, a small model, and what a test starts beside."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: one more than there are cores, as far as memory goes: many tests wait for a while."""
    import psutil

    from skymemory.testbed.carrying import processors

    room = psutil.virtual_memory().available // _WORKER_BYTES
    return max(1, min(round(processors()) + 1, int(room), _MOST_WORKERS))


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Draws nothing from the source, after Hypothesis has read which profile is asked for; and hears Ctrl-C.

    Hypothesis also draws literals of the modules imported so far. Then a test would draw other examples alone than in
    the whole run, and others again whenever a number changes anywhere in src. tests/tools/test_same_draws.py fails
    should this stop working.
    """
    if settings.get_current_profile_name() != "fresh":
        providers._get_local_constants = Constants
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell starts its background jobs so, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects with the garbage collector off, then freezes what was imported: torch, transformers, 9,000 tests.

    Millions of objects that live until the end: to scan them again and again took a seventh of the processor time of
    246 tests run alone. Cycles that a test makes are collected as ever, since they are younger.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        brief = item.get_closest_marker("brief")
        if brief is None:
            continue
        of_all = item.nodeid.partition("[")[0]
        number, cases[of_all] = cases[of_all], cases[of_all] + 1
        every = brief.kwargs.get("every")
        if number % every if every else getattr(getattr(item, "callspec", None), "id", None) not in brief.args:
            item.add_marker("slow")
            item.add_marker("seeded")
    if settings.get_current_profile_name() == "brief":
        for holder, name in dict.fromkeys(filter(None, map(_settings_of, items))):
            drawn = getattr(holder, name)
            count = min(drawn.max_examples, max(_BRIEF_LEAST, round(_BRIEF_SHARE * drawn.max_examples)))
            setattr(holder, name, settings(drawn, max_examples=count))


def _settings_of(item: pytest.Item) -> tuple[object, str] | None:
    """The object and its attribute that say how many examples this test draws: a function's, or a state machine's."""
    if not isinstance(item, pytest.Function):
        return None
    name = "_hypothesis_internal_use_settings"
    function = getattr(item.obj, "__func__", item.obj)
    if hasattr(function, name):
        return function, name
    return (item.cls, "settings") if isinstance(getattr(item.cls, "settings", None), settings) else None
