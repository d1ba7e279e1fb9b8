"""Chunks that leave a satellite: their names, and the requests that carry them."""

from __future__ import annotations

from dataclasses import dataclass

from skymemory.constellation.torus import SatelliteId
from skymemory.protocol.share import ChunkName

AsCopy = tuple[bytes, int, int]
"""(key, 0-based index, replica): the chunk, leaving as that copy."""
Leaving = ChunkName | AsCopy
BURST_CHUNKS = 10
"""Chunks of one MIGRATE request: as many as one segmentation-offload send carries."""


@dataclass(slots=True, eq=False)
class Burst:
    """One MIGRATE request in flight: chunks of one key for one satellite."""

    request_id: int
    destination: SatelliteId
    names: list[Leaving]
    plan: int
    """The number of the plan, one for each move of the box, by which ``destination`` is the place of its chunks."""
    sent_s: float
    """For the first time."""
    deadline_s: float
    last_sent_s: float
    attempts: int = 1
    answered: bool = False
    """Whether some of its chunks have arrived."""
    spared: bool = False
    """Whether its deadline was put off because our host was late."""
