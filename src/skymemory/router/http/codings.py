"""Transfer codings (RFC 9112)."""

from __future__ import annotations

import re
from collections.abc import Sequence

CHUNKED = b"chunked"
_ELEMENTS = re.compile(rb'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')


def transfer_codings(lines: Sequence[bytes]) -> list[bytes]:
    """Return the codings of Transfer-Encoding lines in order, in lower case, with parameters.

    Elements may be empty, and quoted parameters may have commas (RFC 9110, section 5.6.1; RFC 9112, section 6.1).
    """
    if not lines:
        return []
    if len(lines) == 1 and lines[0] == CHUNKED:
        return [CHUNKED]
    elements = (element.strip(b" \t").lower() for element in _ELEMENTS.findall(b",".join(lines)))
    return [element for element in elements if element]
