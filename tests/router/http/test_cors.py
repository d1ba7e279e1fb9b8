"""Pages of browsers: allowed origins are answered as the Fetch standard wants it, and no other origin gets a header."""

from __future__ import annotations

import pytest

from skymemory.config import filled
from skymemory.errors import InvalidInput
from skymemory.router.http.access_control import cors
from skymemory.router.settings import CorsSettings

APP, EVIL = "https://app.example", "https://evil.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, Content-Type"}


def test_off_by_default() -> None:
    reported = cors("OPTIONS", {"origin": APP, **ASKS}, CorsSettings())
    assert reported.headers == () and not reported.preflight


def test_an_allowed_page_is_answered_so_and_another_is_not() -> None:
    settings = CorsSettings(origins=(APP, "http://localhost:3000"))
    reported = cors("POST", {"origin": APP}, settings)
    headers = dict(reported.headers)
    assert not reported.preflight and headers["Access-Control-Allow-Origin"] == APP and headers["Vary"] == "Origin"
    assert "x-ratelimit-remaining-tokens" in headers["Access-Control-Expose-Headers"].split(", ")
    assert "Access-Control-Allow-Credentials" not in headers
    for origin in (EVIL, "null", "https://app.example.evil", "http://app.example", "https://app.example:8443", ""):
        assert cors("POST", {"origin": origin}, settings).headers == (("Vary", "Origin"),)
    assert cors("GET", {}, settings).headers == (("Vary", "Origin"),), "else a cache gives this answer to a page"


def test_a_preflight_is_answered_whole() -> None:
    settings = CorsSettings(origins=(APP,), max_age_s=60.0)
    reported = cors("OPTIONS", {"origin": APP, **ASKS}, settings)
    assert reported.preflight and dict(reported.headers) == {
        "Access-Control-Allow-Origin": APP,
        "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
        "Access-Control-Allow-Headers": "authorization, Content-Type",
        "Access-Control-Max-Age": "60",
        "Vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
    }
    refused = cors("OPTIONS", {"origin": EVIL, **ASKS}, settings)
    assert refused.preflight and [name for name, _ in refused.headers] == ["Vary"]
    assert not cors("OPTIONS", {"origin": APP}, settings).preflight, "it asks for no method: an OPTIONS like any"
    assert not cors("OPTIONS", ASKS, settings).preflight
    assert not cors("POST", {"origin": APP, **ASKS}, settings).preflight


def test_headers_that_are_none_are_not_said_again() -> None:
    asks = {**ASKS, "access-control-request-headers": "x-a, b c, x\r\nset-cookie: z, , x-d;e, x-f"}
    reported = dict(cors("OPTIONS", {"origin": APP, **asks}, CorsSettings(origins=(APP,))).headers)
    assert reported["Access-Control-Allow-Headers"] == "x-a, x-f"
    asks["access-control-request-headers"] = ",".join(f"x-{number}" for number in range(10_000))
    reported = dict(cors("OPTIONS", {"origin": APP, **asks}, CorsSettings(origins=(APP,))).headers)
    assert reported["Access-Control-Allow-Headers"].count(",") == 63
    del asks["access-control-request-headers"]
    reported = dict(cors("OPTIONS", {"origin": APP, **asks}, CorsSettings(origins=(APP,))).headers)
    assert "Access-Control-Allow-Headers" not in reported
    named = CorsSettings(origins=(APP,), headers=("authorization",))
    assert ("Access-Control-Allow-Headers", "authorization") in cors("OPTIONS", {"origin": APP, **ASKS}, named).headers


def test_any_origin_is_a_star_without_credentials() -> None:
    settings = CorsSettings(origins=("*",))
    reported = dict(cors("POST", {"origin": EVIL}, settings).headers)
    assert reported["Access-Control-Allow-Origin"] == "*" and "Access-Control-Allow-Credentials" not in reported
    assert "Vary" not in reported, "all get the same answer"
    assert cors("POST", {}, settings).headers == ()
    with pytest.raises(InvalidInput, match="name the origins"):
        CorsSettings(origins=("*",), credentials=True)
    reported = dict(cors("POST", {"origin": APP}, CorsSettings(origins=(APP,), credentials=True)).headers)
    assert (reported["Access-Control-Allow-Origin"], reported["Access-Control-Allow-Credentials"]) == (APP, "true")


@pytest.mark.parametrize(
    "origin",
    [
        "app.example",
        "https://app.example/",
        "https://App.example",
        "https://*.example",
        "https://",
        "https://a@b.example",
        "https://app.example/x",
        "null",
        "",
        "https://app.example:0",
        "https://app.example:x",
        "https://[::1",
    ],
)
def test_an_invalid_origin_is_reported_when_settings_are_read(origin: str) -> None:
    with pytest.raises(InvalidInput, match="lower case"):
        filled(CorsSettings, {"origins": [origin]}, "cors")


def test_settings_are_written_like_all_others() -> None:
    read = filled(CorsSettings, {"origins": ["https://[::1]:3000"], "max_age": "2m", "credentials": True}, "cors")
    assert read == CorsSettings(("https://[::1]:3000",), (), True, 120.0)
    with pytest.raises(InvalidInput, match="cors: orgins: unknown setting; did you mean 'origins'"):
        filled(CorsSettings, {"orgins": []}, "cors")
    with pytest.raises(InvalidInput, match="leave out the others"):
        CorsSettings(origins=("*", APP))
    with pytest.raises(InvalidInput, match="not the name of a header"):
        CorsSettings(headers=("a b",))
