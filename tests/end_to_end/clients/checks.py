"""What a client's script is: checks by name, and what became of each, as JSON on standard output.

It imports nothing but the standard library: the scripts run in an environment where SkyMemory is not.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("DOOR_URL", "")
"""Ends with /v1."""
KEY = os.environ.get("DOOR_KEY", "")
"""Of a tenant without a quota."""
SMALL_KEY = os.environ.get("DOOR_SMALL_KEY", "")
"""Of one that may ask 20 times a minute."""
CALLS_TOOLS = os.environ.get("DOOR_CALLS_TOOLS") == "1"
"""The engines are scripted, and call tools."""
MODEL = "small"
MOST_ASKED = 60
"""Requests in which a tenant of 20 a minute must have met its limit."""

_checks: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    _checks[function.__name__] = function
    return function


def check_of_tools(function: Callable[[], Any]) -> Callable[[], Any]:
    return check(function) if CALLS_TOOLS else function


def main() -> None:
    """``ok`` or a traceback, by name."""
    became: dict[str, str] = {}
    for name, function in _checks.items():
        try:
            function()
            became[name] = "ok"
        except BaseException:
            became[name] = traceback.format_exc()
    json.dump(became, sys.stdout)
