"""Reasons why a value was not loaded, or not stored.

Their texts are labels of counters, and part of logs and of what commands print.
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Miss(StrEnum):
    """Reason why a value was not loaded, or not stored; of success None.

    The sky counts it as ``operations_failed`` (client) and ``failures`` (store), Redis as ``failed``, the disk as
    ``unread``, the cache of blocks as ``failed_blocks_total``, plug-ins as ``misses_total``, vLLM's connector as
    ``failed_loads``. The last three count what their store reports, too.
    """

    # Nothing is stored.
    ABSENT = "absent"
    """The tier lacks the key. Counted by the cache and plug-ins."""
    MISSING = "missing"
    """Every place where a chunk may be lacks it: the value is lost. Counted by the sky."""
    UNDER_WAY = "under way"
    """A chunk was not found, which proves nothing while the box moves. Counted by the sky."""
    UNCERTAIN = "uncertain"
    """The index lacks the key, but a satellite of its box is silent. Counted by the cache and plug-ins."""

    # Something else is stored.
    CORRUPT = "corrupt"
    """A checksum or a header is wrong. Counted by the sky, Redis, the disk, the cache and plug-ins."""
    FOREIGN = "foreign"
    """The value is sound, but of another key or shape. Counted by the cache and plug-ins."""
    OTHER_VERSION = "other version"
    """The chunks are of another value of the key. Counted by the sky."""
    LATER_VERSION = "later version"
    """Only a later release can read the value, which stays. Counted by Redis, the disk, the cache and plug-ins."""
    UNREADABLE = "unreadable"
    """The file cannot be opened or read. Counted by the disk."""
    SEALED = "sealed"
    """The value is sealed, and no key was given. Not counted: ``skymemory kv`` prints it."""
    NOT_AUTHENTIC = "not authentic"
    """No key opens the value: another tenant's, tampering, or a retired key. Counted as ``values_not_authentic``."""
    UNKNOWN_KEY = "unknown key"
    """The secret has not arrived yet; the value stays. Counted as ``values_unknown_key``."""
    CODEC_NOT_READABLE = "codec not readable"
    """The cache does not read the value's codec. Counted by the cache."""
    CODEC_NOT_INSTALLED = "codec not installed"
    """A package of the value's codec is not installed. Counted by the cache."""

    # No answer came.
    UNREACHABLE = "unreachable"
    """The server or satellite is known not to answer. Counted by the sky, Redis, the cache, plug-ins and vLLM."""
    TIMEOUT = "timeout"
    """A satellite was silent for too long. Counted by the sky."""
    OUT_OF_SIGHT = "out of sight"
    """No satellite is in sight. Counted by the sky."""
    DEADLINE = "deadline"
    """It takes longer than the caller waits, or than computing. Counted by the cache, plug-ins and vLLM."""
    TOO_MANY_BYTES = "too many bytes in flight"
    """Other loads from slow tiers take all the room. Counted by the cache and plug-ins."""
    TOO_MANY_LOADS = "too many loads"
    """Other loads wait for the threads. Counted by vLLM."""

    # The answer is no.
    REFUSED = "refused"
    """The satellite does not accept the command, or the server replies with an error. Counted by the sky and Redis."""
    UNSUPPORTED = "unsupported"
    """The satellite does not know the operation. Counted by the sky."""
    FULL = "full"
    """A satellite has no room for a chunk. Counted by the sky."""
    INTERRUPTED = "interrupted"
    """The write stood still for so long that satellites may have dropped its first chunks. Counted by the sky."""
    NO_ROOM = "no room"
    """The engine does not take the value. Counted by plug-ins."""
    NOT_TAKEN = "no room, or no answer"
    """The store does not take the value. Counted by plug-ins, as ``refused_total``."""
    TOO_LARGE = "too large"
    """The value never fits the store. Counted by plug-ins, as ``refused_total``."""
    QUEUE_FULL = "queue full"
    """Too many bytes wait to be stored. Counted by plug-ins, as ``refused_total``."""
    UNKNOWN_TYPE = "kv_dtype is missing"
    """The value is bytes of unknown type. Counted by LMCache's plug-in, as ``refused_total``."""
    FAULT = "fault"
    """The connector raised an unexpected exception. Counted by vLLM."""

    # Nothing was tried, or no longer.
    TOO_SHORT = "shorter than a block"
    """The prompt has no full block. Not counted: ``LoadResult.not_found``."""
    STORED_JUST_NOW = "stored just now"
    """The block was stored after the lookup. Not counted: ``LoadResult.not_found``."""
    BEHIND_FAILED = "behind a failed block"
    """An earlier block of the prompt failed. Counted by the cache."""
    BEHIND_MISS = "behind a miss"
    """An earlier value of the prompt missed. Counted by plug-ins."""
    UNSERVABLE = "unservable model"
    """The model was changed into one that no cache serves. Not counted: ``LoadResult.failed_blocks``."""
    NO_STATE = "no state"
    """No state of the recurrent layers is stored. Not counted: ``LoadResult.failed_blocks``."""
    NOT_IN_TIME = "not stored in time"
    """Another engine was to store the value, and has not. Counted by vLLM."""
    ABORTED = "aborted"
    """The request has ended. Not counted."""


UNANSWERED = frozenset({Miss.UNREACHABLE, Miss.TIMEOUT, Miss.OUT_OF_SIGHT})
"""Reasons of a store that did not answer."""
INVALID = frozenset({Miss.CORRUPT, Miss.FOREIGN})
"""Reasons of bytes that are wrong for any reader: the value is deleted."""
LOST = (Miss.MISSING, Miss.CORRUPT)
"""Reasons that prove the loss of a value in the sky."""
