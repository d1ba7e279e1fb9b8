"""Limits on the lists, objects, texts and numbers of a body, which bound the time and memory of decoding it.

A body of 16 MiB may hold millions of tiny values, each of which becomes an object. A decoder holds the interpreter lock
until it is done, so that even in a thread it would stop the event loop. Counting decodes nothing.
"""

from __future__ import annotations

from skymemory import native
from skymemory.router.api_error import ApiError

MAX_LISTS = 32_768
"""Limit of lists and objects: messages, their parts, tools and the objects of a tool's schema."""
MAX_TEXTS = 65_536
"""Limit of texts and names of fields. A message has about four, and each of its parts as many."""
MAX_VALUES = 131_072
MAX_TOKEN_NUMBERS = 4 << 20
"""Limit of values if a prompt may be tokens: more than the longest context."""
MAX_FIELDS = 1024
UNCOUNTED_BYTES = 8192
"""Length below which a body is read in much less than a turn of the event loop."""
IN_LOOP_BYTES = 131_072
IN_LOOP_LISTS = 1024
IN_LOOP_VALUES = 8192


def check_items(body: bytes, takes_tokens: bool) -> None:
    """Check the limits.

    Args:
        takes_tokens: the path's prompts may be lists of token numbers.

    Raises:
        ApiError: 400, the body holds more than the limits allow.
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
    """Return True if reading is fast enough for the event loop; otherwise a thread should read it."""
    if len(body) < UNCOUNTED_BYTES:
        return True
    if len(body) >= IN_LOOP_BYTES:
        return False
    lists, _, commas, _, _ = native.json_counts(body)
    return lists <= IN_LOOP_LISTS and commas <= IN_LOOP_VALUES
