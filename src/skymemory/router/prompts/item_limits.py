"""Limits on the items of a body, which bound the time and memory of decoding.

16 MiB may hold millions of values, and a decoder holds the interpreter lock until it is done, even in a thread.
"""

from __future__ import annotations

from skymemory import native
from skymemory.router.api_error import ApiError

MAX_LISTS = 32_768
MAX_TEXTS = 65_536
MAX_VALUES = 131_072
MAX_TOKEN_NUMBERS = 4 << 20
"""Limit if a prompt may be tokens: more than the longest context."""
MAX_FIELDS = 1024
UNCOUNTED_BYTES = 8192
"""Length below which a body needs no count."""
IN_LOOP_BYTES = 131_072
IN_LOOP_LISTS = 1024
IN_LOOP_VALUES = 8192


def check_items(body: bytes, takes_tokens: bool) -> None:
    """Check the limits. ``takes_tokens``: prompts may be token numbers.

    Raises:
        ApiError: 400, the body holds more.
    """
    if len(body) < UNCOUNTED_BYTES:
        return
    lists, texts, commas, fields, _ = native.json_counts(body)
    most_values = MAX_TOKEN_NUMBERS if takes_tokens else MAX_VALUES
    for count, most, what in (
        (lists, MAX_LISTS, "lists and objects"),
        (texts, MAX_TEXTS, "texts and names"),
        (commas, most_values, "values"),
        (fields, MAX_FIELDS, "fields"),
    ):
        if count > most:
            raise ApiError(400, f"the body has {count:,} {what}; at most {most:,} are allowed")


def is_read_in_loop(body: bytes) -> bool:
    """Return True if the event loop may read it; otherwise a thread should."""
    if len(body) < UNCOUNTED_BYTES:
        return True
    if len(body) >= IN_LOOP_BYTES:
        return False
    lists, _, commas, _, _ = native.json_counts(body)
    return lists <= IN_LOOP_LISTS and commas <= IN_LOOP_VALUES
