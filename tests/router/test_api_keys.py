"""API keys: what a file of them says, what is wrong with one, and what comes of quotas."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory.router.api_keys import (
    ApiKeys,
    KeyFile,
    NoKey,
    QuotaExceeded,
    Tenant,
    api_keys_from,
    as_duration,
    new_key,
    read_api_keys,
    with_key,
)

KEY, OTHER = new_key(bytes(range(32))), new_key(b"x" * 32)
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
FILE = f"""\
[tenants.gold]  # who pays most
requests_per_minute = 6
tokens_per_minute = 6_000
max_in_flight = 2
priority = 2
weight = 3

[tenants."free.one"]

[[keys]]
tenant = "gold"
sha256 = "{DIGEST}"
note = "a laptop"
"""


def keys(**quota: object) -> tuple[ApiKeys, Tenant]:
    tenant = Tenant("t", **quota)  # type: ignore[arg-type]
    return ApiKeys(KeyFile({"t": tenant})), tenant


def reported(error: QuotaExceeded) -> dict[str, str]:
    return dict(json.loads(error.body())["error"])


def test_a_file_says_whose_key_it_is_and_what_he_may_have() -> None:
    read = api_keys_from(FILE)
    gold = read.tenants["gold"]
    assert (gold.name, gold.requests_per_minute, gold.tokens_per_minute, gold.max_in_flight) == ("gold", 6, 6000, 2)
    assert (gold.priority, gold.weight) == (2, 3.0)
    assert read.tenants["free.one"] == Tenant("free.one") and read.weights == {"gold": 3.0, "free.one": 1.0}
    door = ApiKeys(read)
    assert door.tenant_of(f"Bearer {KEY}") is gold and door.tenant_of(f"  bearer   {KEY} ") is gold
    assert KEY not in repr(read) and DIGEST not in repr(read)


@pytest.mark.parametrize(
    "said", [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {OTHER}", f"Bearer {DIGEST}"]
)
def test_no_client_is_admitted_without_a_known_key(said: str | None) -> None:
    with pytest.raises(NoKey) as caught:
        ApiKeys(api_keys_from(FILE)).tenant_of(said)
    error = caught.value
    body = json.loads(error.body())["error"]
    assert (error.status, body["type"], body["code"]) == (401, "invalid_request_error", "invalid_api_key")
    assert error.headers["WWW-Authenticate"] == "Bearer"
    assert OTHER not in body["message"] and KEY not in body["message"]
    # The words by which litellm raises AuthenticationError instead of BadRequestError.
    assert ("Incorrect API key provided" in body["message"]) == (said in (f"Bearer {OTHER}", f"Bearer {DIGEST}"))


def test_a_header_that_is_no_text_is_no_key() -> None:
    with pytest.raises(NoKey):
        ApiKeys(api_keys_from(FILE)).tenant_of("Bearer \udcff\udc80")


@pytest.mark.parametrize(
    ("was", "wrong", "words"),
    [
        ("[tenants.gold]", "[tenant.gold]", "line 1: tenant: unknown table; did you mean 'tenants'?"),
        ("weight = 3", "wieght = 3", "line 1: tenants.gold: wieght: unknown setting; did you mean 'weight'?"),
        ("weight = 3", "weight = 0", "tenants.gold: weight: 0: expected a number above 0"),
        ("priority = 2", "priority = 11", "tenants.gold: priority: 11: expected -10 to 10"),
        ("requests_per_minute = 6", "requests_per_minute = -6", "-6: expected a whole number, 0 or more"),
        ('tenant = "gold"', 'tenant = "glod"', "line 10: keys, number 1: unknown tenant 'glod'; did you mean 'go"),
        ('tenant = "gold"', "", "line 10: keys, number 1: `tenant` is missing"),
        (f'sha256 = "{DIGEST}"', "", "line 10: keys, number 1: `sha256` is missing"),
        (f'"{DIGEST}"', f'"{KEY}"', "64 hexadecimal digits, and not the key itself"),
        ("[[keys]]", "[keys]", "expected [[keys]] tables"),
        (
            '[tenants."free.one"]',
            '[tenants."a b"]',
            "line 8: tenants.a b: expected a name of at most 64 letters, digits",
        ),
        ("weight = 3", "weight = = 3", "not TOML"),
        (
            '"a laptop"',
            f'"a"\n[[keys]]\ntenant = "gold"\nsha256 = "{DIGEST}"',
            "line 14: keys, number 2: the file has this key twice",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_reported_with_its_place_and_without_a_key(
    tmp_path: Path, was: str, wrong: str, words: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE.replace(was, wrong))
    with pytest.raises(InvalidInput, match=re.escape(words)) as caught:
        read_api_keys(file)
    assert str(caught.value).startswith(f"{file}: ") and KEY not in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read .*: No such file"):
        read_api_keys(tmp_path / "none.toml")
    (tmp_path / "odd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="UTF-16, expected UTF-8"):
        read_api_keys(tmp_path / "odd.toml")


def test_a_key_is_added_and_all_else_stays_as_it_was_written() -> None:
    assert re.fullmatch(r"sk-sky-[A-Za-z0-9_-]{43}", KEY) and KEY != OTHER
    said = with_key(FILE, "gold", OTHER, 'odd "note"\n\\ \x7f 🛰')
    assert said.startswith(FILE) and OTHER not in said
    assert tomllib.loads(said)["keys"][1]["note"] == 'odd "note"\n\\ \x7f 🛰'
    assert ApiKeys(api_keys_from(said)).tenant_of(f"Bearer {OTHER}").name == "gold"
    for tenant in ("new", "a.b", "9-_x"):
        first = with_key("", tenant, KEY)
        assert list(api_keys_from(first).tenants) == [tenant]
        assert with_key(first, tenant, OTHER).count("tenants") == 1
    for tenant in ("", "a b", "-", "x" * 65, 'q"'):
        with pytest.raises(InvalidInput, match="expected a name of at most 64 letters"):
            with_key(FILE, tenant, OTHER)
    with pytest.raises(InvalidInput, match="this key twice"):
        with_key(FILE, "gold", KEY)


def test_the_command_prints_a_key_once_and_keeps_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "api", str(file), "gold", "--note", "mine"]) == 0
    first = capsys.readouterr().out.strip()
    file.write_text(file.read_text().replace("[tenants.gold]", "[tenants.gold]\nweight = 2.5  # kept"))
    assert main(["keys", "api", str(file), "gold"]) == 0
    second = capsys.readouterr().out.strip()
    assert first != second and first not in file.read_text() and "# kept" in file.read_text()
    door = ApiKeys(read_api_keys(file))
    assert door.tenant_of(f"Bearer {first}").weight == door.tenant_of(f"Bearer {second}").weight == 2.5
    before = file.read_text()
    assert main(["keys", "api", str(file), "a b"]) == 2
    assert "expected a name of at most 64 letters" in capsys.readouterr().err and file.read_text() == before
    file.write_text("[[kyes]]\n")
    assert main(["keys", "api", str(file), "gold"]) == 2 and "did you mean" in capsys.readouterr().err


def test_requests_of_a_minute_are_counted_as_openai_reports_them() -> None:
    door, tenant = keys(requests_per_minute=6)
    entered = [door.acquire(tenant, 50, 0.0) for _ in range(6)]
    assert entered[0].headers == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
    }
    with pytest.raises(QuotaExceeded) as caught:
        door.acquire(tenant, 50, 0.75)
    error = caught.value
    assert error.headers == {
        "Retry-After": "10",
        "retry-after-ms": "9250",
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "59.25s",
    }
    assert reported(error)["type"] == "requests" and reported(error)["code"] == "rate_limit_exceeded"
    assert reported(error)["message"] == (
        "Rate limit reached for t on requests per min (RPM): Limit 6, Used 6, Requested 1. Please try again in 9.25s."
    )
    door.acquire(tenant, 50, 10.0)
    with pytest.raises(QuotaExceeded):
        door.acquire(tenant, 50, 10.0)


def test_tokens_are_put_right_when_a_request_has_ended() -> None:
    door, tenant = keys(tokens_per_minute=6000)
    first = door.acquire(tenant, 5000, 0.0)
    with pytest.raises(QuotaExceeded) as caught:
        door.acquire(tenant, 2000, 0.0)
    assert caught.value.headers["retry-after-ms"] == "10000" and reported(caught.value)["type"] == "tokens"
    door.release(first, 1000, 0.0)
    door.release(first, 1000, 0.0)
    second = door.acquire(tenant, 5000, 0.0)
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    door.release(second, 8000, 0.0)  # it said less than it took: the tenant owes
    with pytest.raises(QuotaExceeded) as caught:
        door.acquire(tenant, 1000, 0.0)
    assert caught.value.headers["retry-after-ms"] == "40000"
    third = door.acquire(tenant, 1000, 40.0)
    door.release(third, None, 40.0)
    assert door.acquire(tenant, 0, 41.0).headers["x-ratelimit-remaining-tokens"] == "100"


def test_a_bucket_never_holds_more_than_a_minutes_worth() -> None:
    door, tenant = keys(tokens_per_minute=6000)
    long = door.acquire(tenant, 5000, 0.0)
    door.release(long, 10, 3600.0)
    assert door.acquire(tenant, 1, 3600.0).headers["x-ratelimit-remaining-tokens"] == "5999"


def test_a_request_that_can_never_be_admitted_gets_no_retry_time() -> None:
    door, tenant = keys(tokens_per_minute=6000)
    with pytest.raises(QuotaExceeded) as caught:
        door.acquire(tenant, 6001, 0.0)
    assert caught.value.headers["x-should-retry"] == "false" and "Retry-After" not in caught.value.headers
    assert reported(caught.value)["message"].startswith("Request too large for t on tokens per min (TPM): Limit 6000")
    assert reported(caught.value)["type"] == "tokens"


def test_requests_at_once_are_counted_until_they_end() -> None:
    door, tenant = keys(max_in_flight=2, requests_per_minute=100)
    first, second = door.acquire(tenant, 1, 0.0), door.acquire(tenant, 1, 0.0)
    with pytest.raises(QuotaExceeded, match="2 requests of t are in flight") as caught:
        door.acquire(tenant, 1, 0.0)
    assert caught.value.headers["Retry-After"] == "1"
    door.release(first, None, 0.0)
    door.release(first, None, 0.0)
    third = door.acquire(tenant, 1, 0.0)
    assert third.headers["x-ratelimit-remaining-requests"] == "97", "what is refused takes nothing"
    with pytest.raises(QuotaExceeded):
        door.acquire(tenant, 1, 0.0)
    door.release(second, None, 0.0)


def test_without_a_quota_nothing_is_counted_or_reported() -> None:
    door, tenant = keys()
    assert all(door.acquire(tenant, 1e9, 0.0).headers == {} for _ in range(100))


def test_a_new_file_keeps_what_was_had() -> None:
    door = ApiKeys(api_keys_from(FILE))
    gold = door.tenant_of(f"Bearer {KEY}")
    first, second = door.acquire(gold, 5000, 0.0), door.acquire(gold, 500, 0.0)
    door.replace(api_keys_from(FILE.replace("= 6\n", "= 8\n").replace("6_000", "5_800")), 0.0)
    gold = door.tenant_of(f"Bearer {KEY}")
    with pytest.raises(QuotaExceeded, match="its limit"):
        door.acquire(gold, 1, 0.0)
    door.release(first, None, 0.0)
    entered = door.acquire(gold, 100, 0.0)
    assert entered.headers["x-ratelimit-remaining-requests"] == "5", "8, of which this is the third"
    assert entered.headers["x-ratelimit-remaining-tokens"] == "200", "5,800 less 5,600"
    door.replace(api_keys_from(FILE.replace("6_000", "100")), 0.0)
    assert door.weights["gold"] == 3.0
    door.release(second, None, 0.0)
    with pytest.raises(QuotaExceeded) as caught:
        door.acquire(door.tenant_of(f"Bearer {KEY}"), 100, 0.0)
    assert caught.value.headers["retry-after-ms"] == "60000", "a smaller quota is used up, and no tenant owes for it"
    door.replace(KeyFile(), 0.0)
    with pytest.raises(NoKey):
        door.tenant_of(f"Bearer {KEY}")
    door.release(entered, 100, 0.0)


def test_a_new_file_counts_at_once_for_what_is_under_way() -> None:
    door = ApiKeys(api_keys_from(FILE))
    gold = door.tenant_of(f"Bearer {KEY}")
    for _ in range(2):
        door.acquire(gold, 1, 0.0)
    door.replace(api_keys_from(FILE.replace("max_in_flight = 2", "max_in_flight = 3")), 0.0)
    entered = door.acquire(gold, 1, 0.0)
    assert entered.tenant.max_in_flight == 3, "whose key was looked at before, too"
    with pytest.raises(QuotaExceeded, match="3 requests of gold"):
        door.acquire(gold, 1, 0.0)


@given(st.integers(0, 2**32), st.integers(1, 120), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_no_stretch_of_time_has_more_than_its_part_and_a_minutes(seed: int, requests: int, tokens: int) -> None:
    """And a request that comes at its retry time is admitted."""
    dice = random.Random(seed)
    door, tenant = keys(requests_per_minute=requests, tokens_per_minute=tokens)
    let_in: list[tuple[float, float]] = []
    now_s = 0.0
    for _ in range(120):
        now_s += dice.choice([0.0, 0.0, 0.1, 1.0, 30.0])
        wanted = dice.randint(0, tokens)
        try:
            door.acquire(tenant, wanted, now_s)
        except QuotaExceeded as error:
            now_s += int(error.headers["retry-after-ms"]) / 1000
            try:
                door.acquire(tenant, wanted, now_s)
            except QuotaExceeded as other:
                assert other.kind != error.kind, "the other of the two limits may still stand against it"
                continue
        let_in.append((now_s, wanted))
    for at, (since_s, _) in enumerate(let_in):
        count, had = 0, 0.0
        for until_s, wanted in let_in[at:]:
            count, had = count + 1, had + wanted
            assert count <= requests * (1 + (until_s - since_s) / 60) + 1e-3
            assert had <= tokens * (1 + (until_s - since_s) / 60) + 1e-3


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0ms"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9999, "1s"),
        (1.25, "1.25s"),
        (59.9995, "1m0s"),
        (360.0, "6m0s"),
        (3600.0, "1h0m0s"),
        (3661.5, "1h1m1.5s"),
    ],
)
def test_times_are_written_as_openais_headers_have_them(seconds: float, words: str) -> None:
    assert as_duration(seconds) == words
