"""Whether a constellation asks for MACs, and that none listens beyond this computer without."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skymemory.errors import InvalidInput
from skymemory.protocol.authentication import MAX_SIGNED_CHUNK_BYTES
from skymemory.testbed.key_file import KeyFollower

if TYPE_CHECKING:
    from skymemory.testbed.plan import ConstellationPlan, HostShare

AUTH_MODES = ("off", "on", "every")
"""No MACs, MACs on commands, MACs on every packet."""


def check_auth(auth: str, keys_file: str, chunk_bytes: int) -> None:
    """Raise ``InvalidInput`` for a plan that cannot be authenticated as it says."""
    if auth not in AUTH_MODES:
        raise InvalidInput(f"auth {auth!r}: expected one of {', '.join(AUTH_MODES)}")
    if auth != "off" and not keys_file:
        raise InvalidInput(f"auth {auth} without a keys_file: name one, `skymemory keys new` makes it")
    if auth != "off" and chunk_bytes > MAX_SIGNED_CHUNK_BYTES:
        raise InvalidInput(
            f"chunks of {chunk_bytes} bytes with MACs: at most {MAX_SIGNED_CHUNK_BYTES}, or more with --auth off"
        )


def follower_of(plan: ConstellationPlan, say: Callable[[str], None] | None = None) -> KeyFollower | None:
    """The keys of a plan, which must be there; None where it asks for no MACs."""
    if plan.auth == "off":
        return None
    return KeyFollower(Path(plan.keys_file), plan.auth == "every", say)


def check_exposure(plan: ConstellationPlan, host: HostShare, listen: str | None, insecure: bool) -> None:
    """Refuse to bind an address that other computers reach where anybody could then evict, move and fill."""
    address = listen or host.ip
    if plan.auth == "off" and not insecure and not ipaddress.IPv4Address(address).is_loopback:
        raise InvalidInput(
            f"{host.name} would take commands from anybody who reaches {address}: make the plan with --auth on, "
            "or say --insecure on a network of your own"
        )
