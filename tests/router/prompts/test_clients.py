"""Tenants, objectives and promises by the headers that Kubernetes' inference gateways use."""

from __future__ import annotations

import math

import pytest

from skymemory.conductor.request import Slo
from skymemory.router.api_error import ApiError
from skymemory.router.prompts.reader import Clients, promised


def test_the_gateways_headers_count_only_where_that_is_said() -> None:
    headers = {"x-gateway-inference-fairness-id": "team", "x-gateway-inference-objective": "chat"}
    assert Clients("", "x-priority").tenant(headers, "u") == "u"
    assert Clients("", "x-priority").priority(headers, b"") == 0
    clients = Clients("x-tenant", "x-priority", {"chat": 100, "batch": -5})
    assert clients.tenant(headers, "u") == "team" and clients.priority(headers, b"7") == 100
    assert clients.tenant({"x-tenant": "mine", **headers}, "u") == "mine", "what the operator names goes first"
    assert clients.priority({"x-priority": "2", **headers}, b"") == 2
    assert clients.priority({"x-gateway-inference-objective": "unheard of"}, b"7") == 0
    assert clients.priority({}, b"7") == -7
    later = {"x-llm-d-inference-fairness-id": "team", "x-llm-d-inference-objective": "batch"}
    assert clients.tenant(later, "u") == "team" and clients.priority(later, b"") == -5
    assert Clients("", "", {"chat": 3}).priority({"x-gateway-inference-objective": "chat"}, b"7") == 3


def test_a_request_names_its_own_promises_in_milliseconds() -> None:
    default = Slo(4.0, 0.05)
    assert promised({}, default) is default and promised({}) is None
    assert promised({"x-slo-ttft-ms": "500"}, default) == Slo(0.5, 0.05)
    assert promised({"x-slo-tpot-ms": "12.5"}, default) == Slo(4.0, 0.0125)
    assert promised({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "0"}) == Slo(0.5, math.inf)
    assert promised({"x-llm-d-slo-tpot-ms": "20"}) == Slo(math.inf, 0.02)
    assert promised({"x-slo-ttft-ms": "0", "x-slo-tpot-ms": "0"}) is None, "as llm-d has it: none"


@pytest.mark.parametrize("said", ["soon", "-1", "nan", "inf", "", "1e999"])
def test_a_promise_that_is_no_time_is_the_clients_mistake(said: str) -> None:
    with pytest.raises(ApiError, match="x-slo-ttft-ms") as caught:
        promised({"x-slo-ttft-ms": said})
    assert caught.value.status == 400
