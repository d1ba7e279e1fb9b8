"""API keys of the HTTP proxy, the tenants that own them, and the tenants' quotas.

The file::

    [tenants.gold]                 # required for every tenant with a key, even if empty
    requests_per_minute = 600
    tokens_per_minute = 200_000    # of prompts and responses
    max_in_flight = 16
    priority = 2
    weight = 3.0

    [[keys]]                       # for each client; `skymemory keys api FILE TENANT` adds them
    tenant = "gold"
    sha256 = "…"                   # of the key; the key itself is stored nowhere
    note = "laptop of the evaluation team"

Keys are 32 random bytes, so a plain hash protects them.

Quotas are token buckets of one minute's worth, refilled continuously. A request takes its estimated tokens; its end
corrects them, even below zero.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skymemory.config import filled, integer, parse_toml, positive, setting, suggestion, text, whole_number
from skymemory.errors import InvalidInput, cannot_read
from skymemory.files import decode_text, read_bounded
from skymemory.pacing import TokenBucket
from skymemory.router.api_error import ApiError

KEY_PREFIX = "sk-sky-"
SECRET_BYTES = 32
MOST_PRIORITY = 10
MINUTE_S = 60.0
_ROUNDING = 1e-6  # tolerance for retries exactly at `Retry-After`
_TABLES = ("tenants", "keys")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADING = re.compile(r"\s*\[{1,2}\s*([^\]#]+?)\s*\]{1,2}\s*(#.*)?$")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Tenant and its quota; 0: no limit."""

    name: str = ""
    requests_per_minute: int = setting("requests_per_minute", whole_number, 0, "requests in a minute; 0: any number")
    tokens_per_minute: int = setting(
        "tokens_per_minute", whole_number, 0, "tokens of prompts and responses; 0: any number"
    )
    max_in_flight: int = setting("max_in_flight", whole_number, 0, "requests at once; 0: any number")
    priority: int = setting("priority", integer, 0, "of its requests; higher goes first")
    weight: float = setting("weight", positive, 1.0, "its share beside other tenants")

    def __post_init__(self) -> None:
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise InvalidInput(f"priority: {self.priority}: expected {-MOST_PRIORITY} to {MOST_PRIORITY}")


def _digest(value: object) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        # The value is not repeated in the message: it may be the key itself, written into the file by mistake.
        raise InvalidInput("expected the key's SHA-256, 64 hexadecimal digits, and not the key itself")
    return bytes.fromhex(value)


@dataclass(frozen=True, slots=True)
class _Key:
    tenant: str = setting("tenant", text, "", "owner of the key")
    digest: bytes = setting("sha256", _digest, b"", "of the key")
    note: str = setting("note", text, "", "for readers of the file")

    def __post_init__(self) -> None:
        for name, value in (("tenant", self.tenant), ("sha256", self.digest)):
            if not value:
                raise InvalidInput(f"`{name}` is missing")


@dataclass(frozen=True, slots=True)
class KeyFile:
    tenants: Mapping[str, Tenant] = field(default_factory=dict)  # by name
    keys: Mapping[bytes, Tenant] = field(default_factory=dict, repr=False)  # tenants by the SHA-256 of their keys

    @property
    def weights(self) -> dict[str, float]:
        return {name: tenant.weight for name, tenant in self.tenants.items()}


def read_api_keys(file: Path) -> KeyFile:
    """Read a file of keys.

    Raises:
        InvalidInput: invalid; the message never has a key.
    """
    try:
        return api_keys_from(decode_text(read_bounded(file)))
    except OSError as error:
        raise InvalidInput(cannot_read(file, error)) from error
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}") from None


def api_keys_from(source: str) -> KeyFile:
    """Parse a file of keys.

    Raises:
        InvalidInput: invalid; the message has the line, if known.
    """
    table = parse_toml(source)
    for name in table:
        if name not in _TABLES:
            raise InvalidInput(f"{_line(source, name)}{name}: unknown table; {suggestion(name, _TABLES)}")
    tenants: dict[str, Tenant] = {}
    for name, quota in _table(table.get("tenants", {})).items():
        where = f"{_line(source, f'tenants.{name}')}tenants.{name}"
        if not _TENANT.fullmatch(name):
            raise InvalidInput(f"{where}: expected a name of at most 64 letters, digits, `.`, `_` and `-`")
        tenants[name] = filled(Tenant, _table(quota, where), where, name=name)
    keys: dict[bytes, Tenant] = {}
    listed = table.get("keys", [])
    if not isinstance(listed, list):
        raise InvalidInput(f"{_line(source, 'keys')}keys: expected [[keys]] tables, one for each")
    for at, entry in enumerate(listed):
        where = f"{_line(source, 'keys', at)}keys, number {at + 1}"
        key = filled(_Key, _table(entry, where), where)
        if key.tenant not in tenants:
            raise InvalidInput(f"{where}: unknown tenant {key.tenant!r}; {suggestion(key.tenant, tenants)}")
        if key.digest in keys:
            raise InvalidInput(f"{where}: the file has this key twice")
        keys[key.digest] = tenants[key.tenant]
    return KeyFile(tenants, keys)


def new_key(secret: bytes) -> str:
    if len(secret) != SECRET_BYTES:
        raise InvalidInput(f"a key needs {SECRET_BYTES} random bytes, got {len(secret)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def with_key(source: str, tenant: str, key: str, note: str = "") -> str:
    """Add a key, and its tenant if new."""
    known = api_keys_from(source).tenants
    added = "" if not source or source.endswith("\n") else "\n"
    if tenant not in known:
        added += f"\n[tenants.{tenant if re.fullmatch('[A-Za-z0-9_-]+', tenant) else _quoted(tenant)}]\n"
    added += f'\n[[keys]]\ntenant = {_quoted(tenant)}\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
    if note:
        added += f"note = {_quoted(note)}\n"
    api_keys_from(source + added)
    return source + added


@dataclass(slots=True, eq=False)
class _TenantAccount:
    tenant: Tenant
    in_flight: int = 0
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None


@dataclass(slots=True, eq=False)
class QuotaLease:
    """Charge of a request in flight to its tenant's quota. ``tokens``: the estimate."""

    tenant: Tenant
    headers: Mapping[str, str]  # `x-ratelimit-…` headers, if there is a quota
    _account: _TenantAccount = field(repr=False)
    tokens: float = field(repr=False)
    _held: bool = field(default=True, repr=False)


class QuotaExceeded(ApiError):
    """429 in OpenAI's format; ``kind`` is ``requests`` or ``tokens``."""

    def __init__(self, message: str, kind: str, tenant: Tenant, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", kind=kind)
        self.tenant = tenant
        self.headers = headers


class NoKey(ApiError):
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class ApiKeys:
    """Valid keys, and use of quotas. Not thread-safe; ``now_s`` must never decrease."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._accounts: dict[str, _TenantAccount] = {}

    @property
    def weights(self) -> dict[str, float]:
        return self._file.weights

    def replace(self, file: KeyFile, now_s: float) -> None:
        """Replace keys and quotas. Tenants in both files keep what they have used."""
        self._file = file
        accounts = {name: account for name, account in self._accounts.items() if name in file.tenants}
        for name, account in accounts.items():
            account.tenant = tenant = file.tenants[name]
            account.requests = _changed(account.requests, tenant.requests_per_minute, now_s)
            account.tokens = _changed(account.tokens, tenant.tokens_per_minute, now_s)
        self._accounts = accounts

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Return the tenant of an ``Authorization`` header.

        Raises:
            NoKey: missing or unknown.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NoKey(401, "the request has no API key; send one in the header `Authorization: Bearer KEY`")
        tenant = self._file.keys.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())
        if tenant is None:
            # OpenAI's message begins with the same words; litellm recognises a wrong key by them.
            raise NoKey(401, "Incorrect API key provided: it is unknown here, or has been revoked")
        return tenant

    def acquire(self, tenant: Tenant, tokens: float, now_s: float) -> QuotaLease:
        """Charge a request's estimated ``tokens`` to its tenant.

        Raises:
            QuotaExceeded: nothing was charged.
        """
        account = self._account(tenant, now_s)
        tenant, requests, bucket = account.tenant, account.requests, account.tokens
        if requests is not None and requests.refill(now_s) < 1 - _ROUNDING:
            raise self._too_much(account, "requests", requests, 1, now_s)
        if bucket is not None and bucket.refill(now_s) < tokens - _ROUNDING:
            raise self._too_much(account, "tokens", bucket, tokens, now_s)
        if tenant.max_in_flight and account.in_flight >= tenant.max_in_flight:
            words = f"{account.in_flight} requests of {tenant.name} are in flight, its limit"
            raise QuotaExceeded(words, "requests", tenant, {**_retry_headers(1.0), **_quota_headers(account, now_s)})
        # Check all limits before charging any, so that a refused request takes nothing.
        if requests is not None:
            requests.spend(1, now_s)
        if bucket is not None:
            bucket.spend(tokens, now_s)
        account.in_flight += 1
        return QuotaLease(tenant, _quota_headers(account, now_s), account, tokens)

    def release(self, lease: QuotaLease, tokens: float | None, now_s: float) -> None:
        """End a request; charge ``tokens`` (None: the estimate). Idempotent."""
        if not lease._held:
            return
        lease._held = False
        account = lease._account
        account.in_flight -= 1
        if tokens is not None and account.tokens is not None:
            account.tokens.refill(now_s)
            account.tokens.give_back(lease.tokens - tokens)

    def _account(self, tenant: Tenant, now_s: float) -> _TenantAccount:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _TenantAccount(
                tenant,
                requests=_changed(None, tenant.requests_per_minute, now_s),
                tokens=_changed(None, tenant.tokens_per_minute, now_s),
            )
        return account

    def _too_much(
        self, account: _TenantAccount, kind: str, bucket: TokenBucket, wanted: float, now_s: float
    ) -> QuotaExceeded:
        """Return the refusal: ``bucket`` lacks ``wanted`` requests or tokens (``kind``)."""
        limit, name = bucket.most, account.tenant.name
        short = {"requests": "RPM", "tokens": "TPM"}[kind]
        if wanted > limit:
            words = (
                f"Request too large for {name} on {kind} per min ({short}): Limit {limit}, Requested {wanted:.0f}. "
                "Shorten the prompt or the maximum output."
            )
            headers = {"x-should-retry": "false", **_quota_headers(account, now_s)}
            return QuotaExceeded(words, kind, account.tenant, headers)
        wait_s = bucket.wait_s(wanted)
        words = (
            f"Rate limit reached for {name} on {kind} per min ({short}): Limit {limit}, "
            f"Used {limit - bucket.level:.0f}, Requested {wanted:.0f}. Please try again in {as_duration(wait_s)}."
        )
        headers = {**_retry_headers(wait_s), **_quota_headers(account, now_s)}
        return QuotaExceeded(words, kind, account.tenant, headers)


def as_duration(seconds: float) -> str:
    """Format a duration as OpenAI does (``6m0s``, ``1.25s``, ``20ms``), rounded up."""
    milliseconds = math.ceil(round(seconds * 1000, 6))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, remainder = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{remainder / 1000:g}s"


def _retry_headers(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def _quota_headers(account: _TenantAccount, now_s: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind, bucket in (("requests", account.requests), ("tokens", account.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.most)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.refill(now_s))))
            headers[f"x-ratelimit-reset-{kind}"] = as_duration(bucket.wait_s(bucket.most))
    return headers


def _changed(bucket: TokenBucket | None, limit: int, now_s: float) -> TokenBucket | None:
    if not limit:
        return None
    bucket = bucket or TokenBucket(limit / MINUTE_S, limit)
    bucket.resize(limit / MINUTE_S, limit, now_s)
    return bucket


def _table(value: object, where: str = "tenants") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}: expected a table")
    return value


def _line(source: str, heading: str, at: int = 0) -> str:
    """Return ``line N: `` for the ``at``-th table of a heading, for errors."""
    for number, line in enumerate(source.splitlines(), 1):
        match = _HEADING.match(line)
        name = "" if match is None else match[1].replace('"', "")
        if name == heading or name.startswith(f"{heading}."):
            if not at:
                return f"line {number}: "
            at -= 1
    return ""


def _quoted(words: str) -> str:
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")
