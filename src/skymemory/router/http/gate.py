"""Who may come in at the HTTP door: pages of browsers by CORS, clients by API keys and quotas."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

from skymemory.conductor.request import Request
from skymemory.errors import InvalidInput
from skymemory.router.api_keys import ApiKeys, Entered, KeyFile, read_api_keys
from skymemory.router.bad_request import BadRequest
from skymemory.router.clients import Clients
from skymemory.router.cors import cors
from skymemory.router.http.connection import Incoming, header_lines
from skymemory.router.http.usage import Usage
from skymemory.router.queue import work_of
from skymemory.router.settings import Settings

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics"))
"""What probes and Prometheus ask for, without a key."""


class Gate:
    def __init__(self) -> None:
        self.keys: ApiKeys | None = None
        """None: nobody needs one."""

    @staticmethod
    def read(settings: Settings) -> KeyFile | None:
        """What is to be taken up with them.

        Raises:
            InvalidInput: the file of keys cannot be read.
        """
        return None if settings.door.api_keys is None else read_api_keys(settings.door.api_keys)

    def take_up(self, settings: Settings, file: KeyFile | None, now_s: float) -> None:
        if file is None:
            self.keys = None
        elif self.keys is None:
            self.keys = ApiKeys(file)
        else:
            self.keys.replace(file, now_s)
        self._cors = settings.cors
        said = settings.admission
        self._clients = Clients(said.tenant_header.lower(), said.priority_header.lower(), said.objectives)

    @property
    def weights(self) -> dict[str, float]:
        """Of tenants, by the file of keys."""
        return {} if self.keys is None else self.keys.weights

    @property
    def is_plain(self) -> bool:
        """Everybody may come in, and nothing is said to browsers."""
        return self.keys is None and not self._cors.origins

    def refusal(self, request: Incoming) -> BadRequest | None:
        """Asked when the headers have come: a body that nobody may send is not read."""
        if self._cors.origins:
            told = cors(request.method, request.headers, self._cors)
            request.answer_headers = header_lines(told.headers)
            request.is_preflight, request.speaks_cors = told.preflight, True
            if told.preflight:
                return None
        if self.keys is not None and request.path not in OPEN_PATHS:
            try:
                request.tenant = self.keys.tenant_of(request.headers.get("authorization"))
            except BadRequest as error:
                return error
        return None

    def enter(self, incoming: Incoming, request: Request, now_s: float) -> tuple[Request, Entered | None]:
        """The request as its tenant may have it, and what is to be ``left`` when it is over.

        Raises:
            QuotaExceeded: 429.
        """
        tenant = incoming.tenant
        if tenant is None or self.keys is None:
            return request, None
        entered = self.keys.enter(tenant, work_of(request), now_s)
        if entered.headers:
            incoming.answer_headers += header_lines(tuple(entered.headers.items()))
        # What a client says of its urgency counts downwards only: the operator says how urgent a tenant may be.
        said = self._clients.priority(incoming.headers, b"") if self._says(incoming) else tenant.priority
        return replace(request, tenant=tenant.name, priority=min(said, tenant.priority)), entered

    def left(self, entered: Entered, usage: Usage | None, now_s: float) -> None:
        if self.keys is not None:
            tokens = None if usage is None else float(usage.prompt_tokens + (usage.output_tokens or 0))
            self.keys.left(entered, tokens, now_s)

    def _says(self, incoming: Incoming) -> bool:
        return self._clients.says_priority(incoming.headers)


class OwnCertificate:
    """What the door itself shows, read anew without a restart: new connections get the new one."""

    def __init__(self, chain: Path, key: Path) -> None:
        """
        Raises:
            InvalidInput: a file cannot be read, or is no PEM, or the key is another's.
        """
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.read(chain, key)

    def read(self, chain: Path, key: Path) -> None:
        # First beside: a context whose chain was read and whose key was not would be neither the old nor the new.
        self.check(chain, key)
        _load(self.context, chain, key)

    @staticmethod
    def check(chain: Path, key: Path) -> None:
        """Whether they could be ``read``; raises as that does."""
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), chain, key)


def _load(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    try:
        context.load_cert_chain(chain, key)
    except ssl.SSLError as error:
        raise InvalidInput(
            f"door: tls_cert {str(chain)!r} and tls_key {str(key)!r} are no pair in PEM: {error.reason or error}"
        ) from error
    except OSError as error:
        raise InvalidInput(f"door: tls_cert {str(chain)!r}, tls_key {str(key)!r}: {error.strerror or error}") from error
