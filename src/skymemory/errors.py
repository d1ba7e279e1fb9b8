"""Errors a caller can meet. Each says what was wrong, what was expected and what to do.

A miss is a value and corruption is a counter; neither is an error (see ``ARCHITECTURE.md``).
"""

from __future__ import annotations


class SkyMemoryError(Exception):
    """Base of everything SkyMemory raises on purpose."""


class InvalidInput(SkyMemoryError, ValueError):
    """An argument, option or file that cannot be used as it is."""


class LaterFile(InvalidInput):
    """A file that a later release wrote: it is left as it is."""


class UnknownPreset(InvalidInput):
    """A constellation preset by a name we do not know."""


class ValueTooLarge(InvalidInput):
    """A value, chunk or packet over a stated limit; the message names the limit."""


class MalformedPacket(SkyMemoryError, ValueError):
    """Bytes that are not a packet of ours. Receivers count and drop; only parsers raise."""


class LaterVersion(MalformedPacket):
    """Bytes of ours in a version that only a later release reads: a miss, and not to be deleted or written over."""


class CodecUnavailable(SkyMemoryError):
    """A codec whose optional dependency is not installed; the message names the extra."""


class MissingExtra(SkyMemoryError):
    """An optional dependency that is not installed; the message names the extra that brings it."""


class CacheMisuse(SkyMemoryError, ValueError):
    """A cache was handed to a model with what it cannot serve; nothing was computed."""


class UnsupportedModel(SkyMemoryError):
    """A model whose cache we cannot store faithfully (hybrid, sliding-window, encoder-decoder …)."""


class ConstellationError(SkyMemoryError):
    """The constellation's processes could not be started, found or stopped."""


class NoConstellation(ConstellationError):
    """No constellation is running where we looked."""


class CommandsRefused(ConstellationError):
    """Satellites answered that they do not take this computer's commands."""

    def __init__(self, before: str = "") -> None:
        super().__init__(
            f"{before}satellites refuse the commands of this computer: it has other keys than they (copy the key file "
            "of their run directory here), or none, or its clock is more than 30 s from theirs"
        )


class WrongProcess(SkyMemoryError):
    """A store, socket or manager that a fork has carried into another process than the one that opened it."""
