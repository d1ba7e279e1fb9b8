"""Who sends a request, and how urgent it is: for rules that share out what there is too little of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from skymemory.router.bad_request import BadRequest

MOST_PRIORITY = 10
"""Above it and below its negative there are no further levels."""
_KEY_LETTERS = 16
_NAME_LETTERS = 256

_number = msgspec.json.Decoder(int | None)


@dataclass(frozen=True, slots=True)
class Clients:
    """Where it is said. Lower-case names of headers; empty: nothing of the kind is read."""

    tenant_header: str = ""
    priority_header: str = ""

    def tenant(self, headers: Mapping[str, str], user: str) -> str:
        """What its header names, else a digest of its API key, else the ``user`` of its body."""
        if self.tenant_header and (named := headers.get(self.tenant_header)):
            return named[:_NAME_LETTERS]
        if key := headers.get("authorization"):
            return _digest(key)
        return user[:_NAME_LETTERS]

    def priority(self, headers: Mapping[str, str], field: bytes) -> int:
        """Higher goes first. The header says it so; the body's ``priority`` is vLLM's, of which the lower goes first.

        Raises:
            BadRequest: 400, the header is no whole number. Of the field the engine will say so.
        """
        if not self.priority_header:
            return 0
        said = headers.get(self.priority_header)
        try:
            if said is not None:
                level = int(said)
            else:
                level = -(_number.decode(field) or 0) if field else 0
        except ValueError as error:
            if said is None:
                return 0
            raise BadRequest(400, f"{self.priority_header} is {said[:40]!r}; expected a whole number") from error
        return max(-MOST_PRIORITY, min(MOST_PRIORITY, level))


@lru_cache(maxsize=4096)
def _digest(key: str) -> str:
    """Keys are secrets: what is kept, compared and shown is not one."""
    return "key-" + hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()[:_KEY_LETTERS]
