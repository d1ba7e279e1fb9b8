"""Reasons why a value was not loaded, or not stored.

Their texts are labels of counters: ``operations_failed`` of the sky's client, ``failures`` of its store, ``failed`` of
Redis, ``unread`` of the disk, ``failed_blocks_total`` of blocks, ``misses_total`` and ``refused_total`` of plug-ins,
``failed_loads`` of the vLLM connector.
"""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class Miss(StrEnum):
    """Reason why a value was not loaded, or not stored; None is success."""

    # Nothing is stored.
    ABSENT = "absent"
    """The tier does not have the key. Counted by blocks and plug-ins."""
    MISSING = "missing"
    """Every place where a chunk may be has answered that it lacks it: the value is lost. Counted by the sky."""
    UNDER_WAY = "under way"
    """A chunk was not found, which proves nothing while the box moves. Counted by the sky."""
    UNCERTAIN = "uncertain"
    """The index does not have the key, but a satellite of its box is silent. Counted by blocks and plug-ins."""

    # Something else is stored.
    CORRUPT = "corrupt"
    """A checksum or a header is wrong. Counted by the tier that reads it, or by blocks and plug-ins."""
    FOREIGN = "foreign"
    """The value is sound, but of another key or shape. Counted by blocks and plug-ins."""
    OTHER_VERSION = "other version"
    """The chunks are of another value of the key. Counted by the sky."""
    LATER_VERSION = "later version"
    """Only a later release can read the value, which stays. Counted by the tier that reads it, and by blocks."""
    UNREADABLE = "unreadable"
    """The file cannot be opened or read. Counted by the disk."""
    SEALED = "sealed"
    """The value is sealed, and is read without a key. Counted by nobody: users read it."""
    NOT_AUTHENTIC = "not authentic"
    """No key opens the value: another tenant's, tampering, or a retired key. Counted by the sealed store."""
    UNKNOWN_KEY = "unknown key"
    """The secret has not arrived yet. The value stays. Counted by the sealed store."""
    CODEC_NOT_READABLE = "codec not readable"
    """The cache does not read this codec. Counted by blocks."""
    CODEC_NOT_INSTALLED = "codec not installed"
    """A package of the codec is missing. Counted by blocks."""

    # Nobody has answered.
    UNREACHABLE = "unreachable"
    """The store or satellite failed before, or is known not to answer. Counted by whoever asked it."""
    TIMEOUT = "timeout"
    """A satellite was silent for too long. Counted by the sky."""
    OUT_OF_SIGHT = "out of sight"
    """No satellite is above the horizon. Counted by the sky."""
    DEADLINE = "deadline"
    """The call takes longer than its caller waits, or than computing. Counted by blocks, plug-ins and vLLM."""
    TOO_MANY_BYTES = "too many bytes in flight"
    """Other loads from slow tiers take all the room. Counted by blocks and plug-ins."""
    TOO_MANY_LOADS = "too many loads"
    """Other loads wait for the threads. Counted by vLLM."""

    # The answer is no.
    REFUSED = "refused"
    """The satellite does not accept the command, or the server replied otherwise. Counted by the sky and Redis."""
    UNSUPPORTED = "unsupported"
    """The satellite does not know the operation. Counted by the sky."""
    FULL = "full"
    """A satellite has no room for a chunk. Counted by the sky."""
    INTERRUPTED = "interrupted"
    """A write stood still for so long that satellites may have dropped its first chunks. Counted by the sky."""
    NO_ROOM = "no room"
    """The engine's buffer does not take the value. Counted by plug-ins."""
    TOO_LARGE = "too large"
    """The value never fits the store. Counted by plug-ins."""
    NOT_TAKEN = "no room, or no answer"
    """The store did not take the value. Counted by plug-ins."""
    QUEUE_FULL = "queue full"
    """Too many bytes wait to be stored. Counted by plug-ins."""
    UNKNOWN_TYPE = "kv_dtype is missing"
    """The type of the value's bytes is unknown. Counted by the LMCache plug-in."""
    FAULT = "fault"
    """The connector raised an unexpected exception. Counted by vLLM."""

    # Nothing was tried, or no longer.
    TOO_SHORT = "shorter than a block"
    """The prompt has no whole block. Counted by nobody: users read it."""
    STORED_JUST_NOW = "stored just now"
    """The block is there by now. Counted by nobody: users read it."""
    BEHIND_FAILED = "behind a failed block"
    """An earlier block of the prompt failed. Counted by blocks."""
    BEHIND_MISS = "behind a miss"
    """An earlier value of the prompt missed. Counted by plug-ins."""
    UNSERVABLE = "unservable model"
    """The model changed so that its cache is of no use. Counted by blocks."""
    NO_STATE = "no state"
    """A recurrent layer's state is not stored. Counted by blocks."""
    NOT_IN_TIME = "not stored in time"
    """The other engine, which was to store the value, has not. Counted by vLLM."""
    ABORTED = "aborted"
    """The request is gone. Counted by nobody."""


UNANSWERED = frozenset({Miss.UNREACHABLE, Miss.TIMEOUT, Miss.OUT_OF_SIGHT})
"""Reasons of a store that did not answer."""
INVALID = frozenset({Miss.CORRUPT, Miss.FOREIGN})
"""Reasons of bytes that are wrong for any reader: the value is deleted."""
LOST = (Miss.MISSING, Miss.CORRUPT)
"""Reasons that prove that a value of the sky is lost."""
