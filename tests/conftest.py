"""What holds for all tests: which examples Hypothesis draws, and what it says of one that fails.

The default run draws the same examples on every machine and in every clone: from the code of the test itself, not from
a seed, and not from a database in which one clone keeps what failed there. ``make fuzz`` draws anew (profile ``anew``)
and prints its seed; what it finds becomes an ``@example``. No example is bounded in time, which says more of the
machine than of us.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

for _name, _derandomize in (("same", True), ("anew", False)):
    settings.register_profile(
        _name,
        derandomize=_derandomize,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("same")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Draws nothing from the source, after Hypothesis has read which profile is asked for; and hears Ctrl-C.

    Hypothesis also draws literals of the modules imported so far. Then a test would draw other examples alone than in
    the whole run, and others again whenever a number changes anywhere in src. tests/tools/test_same_draws.py fails
    should this stop working.
    """
    if settings.get_current_profile_name() == "same":
        providers._get_local_constants = Constants
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell starts its background jobs so, and children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
