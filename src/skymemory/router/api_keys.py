"""Who may come in at the HTTP door: API keys, the tenants they belong to, and how much a tenant may have.

A file in TOML says it::

    [tenants.gold]                 # every tenant that a key belongs to has a table, even an empty one
    requests_per_minute = 600
    tokens_per_minute = 200_000    # of prompts and answers
    max_in_flight = 16
    priority = 2
    weight = 3.0

    [[keys]]                       # as many as there are clients; `skymemory keys api FILE TENANT` adds one
    tenant = "gold"
    sha256 = "…"                   # of the key; the key itself stands nowhere
    note = "laptop of the evaluation team"

Keys are 32 random bytes, so a plain hash hides them: there is nothing to guess that a slow one would make dear. A key
is found by its hash in a table. How long that takes tells nothing of other keys, for whoever sends one cannot choose
what it hashes to; so no comparison has to take its time.

Quotas are token buckets that hold a minute's worth and fill evenly. A request takes one from the first and what it is
estimated to need from the second, which is put right when it has ended: a bucket may then owe. A request that is
refused takes nothing. What is said of it is what OpenAI's API says, in words and headers that its clients act upon.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from skymemory.config import suggestion
from skymemory.errors import InvalidInput
from skymemory.files import read_bounded
from skymemory.router.bad_request import BadRequest
from skymemory.router.clients import MOST_PRIORITY
from skymemory.router.setting_values import integer, positive, setting, text, whole
from skymemory.router.settings import filled

KEY_PREFIX = "sk-sky-"
SECRET_BYTES = 32
MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Who comes when he was told to must not be told to come again."""
_TABLES = ("tenants", "keys")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEADING = re.compile(r"\s*\[{1,2}\s*([^\]#]+?)\s*\]{1,2}\s*(#.*)?$")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays, and what he may have. A limit of 0 is none."""

    name: str = ""
    requests_per_minute: int = setting("requests_per_minute", whole, 0, "requests in a minute; 0: any number")
    tokens_per_minute: int = setting("tokens_per_minute", whole, 0, "tokens of prompts and answers; 0: any number")
    max_in_flight: int = setting("max_in_flight", whole, 0, "requests at once; 0: any number")
    priority: int = setting("priority", integer, 0, "how urgent its requests are, the higher the more")
    weight: float = setting("weight", positive, 1.0, "its share beside other tenants")

    def __post_init__(self) -> None:
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise InvalidInput(f"priority: {self.priority}: expected {-MOST_PRIORITY} to {MOST_PRIORITY}")


def _digest(value: object) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        # It is not repeated: it may be a key that somebody took for what belongs here.
        raise InvalidInput("expected the key's SHA-256, 64 hexadecimal digits, and not the key itself")
    return bytes.fromhex(value)


@dataclass(frozen=True, slots=True)
class _Key:
    tenant: str = setting("tenant", text, "", "whose key it is")
    digest: bytes = setting("sha256", _digest, b"", "of the key")
    note: str = setting("note", text, "", "for who reads the file")

    def __post_init__(self) -> None:
        for name, value in (("tenant", self.tenant), ("sha256", self.digest)):
            if not value:
                raise InvalidInput(f"it has no `{name}`")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a file of keys says."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[bytes, Tenant] = field(default_factory=dict, repr=False)
    """Tenants by the SHA-256 of their keys."""

    @property
    def weights(self) -> dict[str, float]:
        """As fairness and the queue take them."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}


def read_api_keys(file: Path) -> KeyFile:
    """
    Raises:
        InvalidInput: it cannot be read, or says what cannot be meant; where it stands, and never a key.
    """
    try:
        return api_keys_from(read_bounded(file).decode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"{file}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file}: it is not UTF-8") from error
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}") from None


def api_keys_from(said: str) -> KeyFile:
    """
    Raises:
        InvalidInput: with the line, as far as that can be told.
    """
    try:
        table = tomllib.loads(said)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"it is not TOML: {error}") from None
    for name in table:
        if name not in _TABLES:
            raise InvalidInput(f"{_line(said, name)}{name}: there is no such table; {suggestion(name, _TABLES)}")
    tenants: dict[str, Tenant] = {}
    for name, quota in _table(table.get("tenants", {})).items():
        where = f"{_line(said, f'tenants.{name}')}tenants.{name}"
        if not _TENANT.fullmatch(name):
            raise InvalidInput(f"{where}: a name has letters, digits and `.`, `_`, `-`, at most 64")
        tenants[name] = filled(Tenant, _table(quota, where), where, name=name)
    keys: dict[bytes, Tenant] = {}
    listed = table.get("keys", [])
    if not isinstance(listed, list):
        raise InvalidInput(f"{_line(said, 'keys')}keys: expected [[keys]] tables, one for each")
    for at, each in enumerate(listed):
        where = f"{_line(said, 'keys', at)}keys, number {at + 1}"
        key = filled(_Key, _table(each, where), where)
        if key.tenant not in tenants:
            raise InvalidInput(f"{where}: there is no tenant {key.tenant!r}; {suggestion(key.tenant, tenants)}")
        if key.digest in keys:
            raise InvalidInput(f"{where}: the same key stands above")
        keys[key.digest] = tenants[key.tenant]
    return KeyFile(tenants, keys)


def new_key(secret: bytes) -> str:
    """A key out of ``SECRET_BYTES`` random ones."""
    if len(secret) != SECRET_BYTES:
        raise InvalidInput(f"a key is made of {SECRET_BYTES} random bytes, not of {len(secret)}")
    return KEY_PREFIX + base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def with_key(said: str, tenant: str, key: str, note: str = "") -> str:
    """The text of a file of keys with one more, and with its tenant if it is new there. All else stays as it stands.

    Raises:
        InvalidInput: the file says what cannot be meant, or the tenant's name is none.
    """
    known = api_keys_from(said).tenants
    added = "" if not said or said.endswith("\n") else "\n"
    if tenant not in known:
        added += f"\n[tenants.{tenant if re.fullmatch('[A-Za-z0-9_-]+', tenant) else _quoted(tenant)}]\n"
    added += f'\n[[keys]]\ntenant = {_quoted(tenant)}\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n'
    if note:
        added += f"note = {_quoted(note)}\n"
    api_keys_from(said + added)
    return said + added


@dataclass(slots=True)
class _Bucket:
    """So many a minute; ``level`` of them can be had now. Below 0 it owes."""

    limit: int
    level: float
    at_s: float

    def filled(self, now_s: float) -> float:
        if now_s > self.at_s:
            self.level = min(float(self.limit), self.level + (now_s - self.at_s) * self.limit / MINUTE_S)
            self.at_s = now_s
        return self.level

    def has_in_s(self, amount: float) -> float:
        """Seconds until it has ``amount``; 0: now."""
        return max(0.0, amount - self.level) * MINUTE_S / self.limit

    def limited_to(self, limit: int) -> None:
        """Another limit. What was had stays had."""
        self.level = max(min(self.level, 0.0), self.level + limit - self.limit)
        self.limit = limit


@dataclass(slots=True, eq=False)
class _Account:
    """What a tenant has had."""

    tenant: Tenant
    in_flight: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


@dataclass(slots=True, eq=False)
class Entered:
    """A request that was let in, until ``left``."""

    tenant: Tenant
    headers: Mapping[str, str]
    """``x-ratelimit-…``, for its answer; empty where the tenant has no quota."""
    _account: _Account = field(repr=False)
    _tokens: float = field(repr=False)
    _inside: bool = field(default=True, repr=False)


class QuotaExceeded(BadRequest):
    """429 as OpenAI's API answers it; ``kind`` says of what there was too much, ``requests`` or ``tokens``."""

    def __init__(self, message: str, kind: str, tenant: Tenant, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", kind=kind)
        self.tenant = tenant
        self.headers = headers
        """``Retry-After`` and ``retry-after-ms``, or ``x-should-retry: false``; and ``x-ratelimit-…``."""


class NoKey(BadRequest):
    """401: no key, or one that nobody has."""

    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})


class ApiKeys:
    """The keys in force, and what every tenant has had. Not for several threads at once; ``now_s`` never runs back."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._accounts: dict[str, _Account] = {}

    @property
    def weights(self) -> dict[str, float]:
        return self._file.weights

    def replace(self, file: KeyFile, now_s: float) -> None:
        """Other keys and quotas. What a tenant has had, and what is under way, stays; of tenants that are no longer
        there nothing does."""
        self._file = file
        kept = {name: account for name, account in self._accounts.items() if name in file.tenants}
        for name, account in kept.items():
            account.tenant = tenant = file.tenants[name]
            account.requests = _changed(account.requests, tenant.requests_per_minute, now_s)
            account.tokens = _changed(account.tokens, tenant.tokens_per_minute, now_s)
        self._accounts = kept

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Whose key a header ``Authorization`` has.

        Raises:
            NoKey: 401, it has none that is known.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise NoKey(401, "no API key came with the request; send it in the header `Authorization: Bearer KEY`")
        tenant = self._file.keys.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest())
        if tenant is None:
            # The first words are OpenAI's: litellm tells a wrong key from a wrong request by them.
            raise NoKey(401, "Incorrect API key provided: it is none that is known here; it may have been retired")
        return tenant

    def enter(self, tenant: Tenant, tokens: float, now_s: float) -> Entered:
        """Let a request in that is estimated to need ``tokens``, of prompt and answer.

        Raises:
            QuotaExceeded: 429, and nothing was taken.
        """
        account = self._account(tenant, now_s)
        tenant, requests, bucket = account.tenant, account.requests, account.tokens
        if requests is not None and requests.filled(now_s) < 1 - _ROUNDING:
            raise self._too_much(account, "requests", requests, 1, now_s)
        if bucket is not None and bucket.filled(now_s) < tokens - _ROUNDING:
            raise self._too_much(account, "tokens", bucket, tokens, now_s)
        if tenant.max_in_flight and account.in_flight >= tenant.max_in_flight:
            words = f"{account.in_flight} requests of {tenant.name} are under way, as many as may be at once"
            raise QuotaExceeded(words, "requests", tenant, {**_come_again(1.0), **_figures(account, now_s)})
        if requests is not None:
            requests.level -= 1
        if bucket is not None:
            bucket.level -= tokens
        account.in_flight += 1
        return Entered(tenant, _figures(account, now_s), account, tokens)

    def left(self, entered: Entered, tokens: float | None, now_s: float) -> None:
        """It has ended, and took ``tokens``. None: nobody said, and what was estimated counts. Twice counts once."""
        if not entered._inside:
            return
        entered._inside = False
        account = entered._account
        account.in_flight -= 1
        if tokens is not None and account.tokens is not None:
            level = account.tokens.filled(now_s) + entered._tokens - tokens
            account.tokens.level = min(float(account.tokens.limit), level)

    def _account(self, tenant: Tenant, now_s: float) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account(
                tenant,
                requests=_changed(None, tenant.requests_per_minute, now_s),
                tokens=_changed(None, tenant.tokens_per_minute, now_s),
            )
        return account

    def _too_much(self, account: _Account, kind: str, bucket: _Bucket, wanted: float, now_s: float) -> QuotaExceeded:
        limit, name = bucket.limit, account.tenant.name
        short = {"requests": "RPM", "tokens": "TPM"}[kind]
        if wanted > limit:
            words = (
                f"Request too large for {name} on {kind} per min ({short}): Limit {limit}, Requested {wanted:.0f}. "
                "The prompt or the answer asked for must be shorter."
            )
            return QuotaExceeded(words, kind, account.tenant, {"x-should-retry": "false", **_figures(account, now_s)})
        wait_s = bucket.has_in_s(wanted)
        words = (
            f"Rate limit reached for {name} on {kind} per min ({short}): Limit {limit}, "
            f"Used {limit - bucket.level:.0f}, Requested {wanted:.0f}. Please try again in {as_duration(wait_s)}."
        )
        return QuotaExceeded(words, kind, account.tenant, {**_come_again(wait_s), **_figures(account, now_s)})


def as_duration(seconds: float) -> str:
    """``6m0s``, ``1.25s``, ``20ms``: as OpenAI's headers have it. Never too short."""
    milliseconds = math.ceil(round(seconds * 1000, 6))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest / 1000:g}s"


def _come_again(wait_s: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def _figures(account: _Account, now_s: float) -> dict[str, str]:
    """Limit, what is left of it, and when all of it is there again."""
    headers: dict[str, str] = {}
    for kind, bucket in (("requests", account.requests), ("tokens", account.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.filled(now_s))))
            headers[f"x-ratelimit-reset-{kind}"] = as_duration(bucket.has_in_s(bucket.limit))
    return headers


def _changed(bucket: _Bucket | None, limit: int, now_s: float) -> _Bucket | None:
    if not limit:
        return None
    if bucket is None:
        return _Bucket(limit, float(limit), now_s)
    bucket.filled(now_s)
    bucket.limited_to(limit)
    return bucket


def _table(value: object, where: str = "tenants") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}: expected a table")
    return value


def _line(said: str, heading: str, at: int = 0) -> str:
    """``line 7: ``, where the ``at``-th heading of that name stands; nothing where it was written otherwise."""
    for number, line in enumerate(said.splitlines(), 1):
        found = _HEADING.match(line)
        named = "" if found is None else found[1].replace('"', "")
        if named == heading or named.startswith(f"{heading}."):
            if not at:
                return f"line {number}: "
            at -= 1
    return ""


def _quoted(words: str) -> str:
    """As a basic string of TOML."""
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")
