"""Seconds as people's clocks on the wall count them, for habits that keep local time when clocks change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from skymemory.errors import InvalidInput

_EPOCH = datetime(1970, 1, 1)


class LocalTime:
    """Unix seconds to local seconds (since 1970-01-01 00:00 on that wall) and back. Without a zone both are the same.

    Where clocks go back an hour comes twice: the first is meant. Where they go forward one is left out: what is asked
    for in it is an hour later on the wall, at the same moment as before the change.
    """

    def __init__(self, zone: str | None = None) -> None:
        """``zone`` is a name of the tz database, such as Europe/Berlin; None is UTC, or any clock as it is."""
        self.zone = zone
        try:
            self._zone = None if zone is None else ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise InvalidInput(
                f"time zone {zone!r} is not known here: expected a name such as Europe/Berlin"
            ) from error

    def to_local(self, at_s: float) -> float:
        if self._zone is None:
            return at_s
        offset = datetime.fromtimestamp(at_s, self._zone).utcoffset()
        return at_s + (offset.total_seconds() if offset is not None else 0.0)

    def from_local(self, local_s: float) -> float:
        if self._zone is None:
            return local_s
        wall = (_EPOCH + timedelta(seconds=local_s)).replace(tzinfo=self._zone)
        return wall.astimezone(UTC).timestamp()
