"""The daemon's configuration as it reads it, and its endpoints: ``share.c`` and its parts as a library."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.flight.daemon import ROOT, build

from skymemory.constellation.torus import SatelliteId
from skymemory.constellation.visibility import GroundHost
from skymemory.placement.locate import Moves
from skymemory.testbed.flight import share_text
from skymemory.testbed.plan import ConstellationPlan

_PARTS = ("share", "orbits", "link_queues", "endpoints")


@lru_cache(maxsize=1)
def library() -> Any:
    folder = build()
    made = folder / "tests" / "libshare.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(f".{os.getpid()}")
    objects = [str(folder / "posix" / f"{name}.o") for name in _PARTS]
    include = [f"-I{ROOT / 'flight' / name}" for name in ("core", "posix")]
    cc = os.environ.get("CC", "cc")
    source = str(Path(__file__).with_name("share.c"))
    core = f"-L{folder}", f"-Wl,-rpath,{folder}", "-lskyflight", "-lm"
    subprocess.run((cc, "-std=c99", "-shared", "-fPIC", *include, "-o", str(part), source, *objects, *core), check=True)
    part.replace(made)
    lib = ctypes.CDLL(str(made))
    it, text, i32, i64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "share_of": (it, (text, text)),
        "share_beam": (ctypes.c_double, (it, ctypes.c_uint32, ctypes.c_void_p, i32, i32, i64)),
        "share_blocked": (ctypes.c_bool, (it, ctypes.c_uint32, ctypes.c_uint32, i32, i32, i64)),
        "share_hop_us": (i64, (it, ctypes.c_uint32, ctypes.c_uint32)),
        "share_timeout_us": (i64, (it, ctypes.c_uint32)),
        "share_queues": (it, (it,)),
        "share_leaves": (
            i64,
            (it, i32, ctypes.c_uint32, ctypes.c_uint32, it, i32, ctypes.c_size_t, i64, i32),
        ),
        "share_figures": (None, (it, i64, ctypes.POINTER(ctypes.c_uint64))),
        "share_counted": (None, (it, i64, ctypes.POINTER(i64))),
        "endpoints_new": (it, (ctypes.c_uint32, text)),
        "endpoints_free": (None, (it,)),
        "endpoints_add": (None, (it, ctypes.c_uint32, text)),
        "endpoints_link": (ctypes.c_uint32, (it, text)),
        "endpoints_satellite": (ctypes.c_bool, (it, ctypes.c_uint32, text)),
        "endpoints_ground": (ctypes.c_bool, (it, ctypes.c_uint32, text)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class Share:
    """What a daemon knows of a plan."""

    def __init__(self, plan: ConstellationPlan) -> None:
        reason = ctypes.create_string_buffer(512)
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(share_text(plan, plan.hosts[0]))
            file.flush()
            self.it = library().share_of(file.name.encode(), reason)
        assert self.it, reason.value.decode()

    def beam_s(self, satellite: SatelliteId, moves: Moves, now_us: int, place: GroundHost | None = None) -> float:
        at = None if place is None else (ctypes.c_double * 2)(place.latitude_deg, place.longitude_deg)
        return float(library().share_beam(self.it, _packed(satellite), at, *moves, now_us))

    def blocked(self, here: SatelliteId, there: SatelliteId, moves: Moves, now_us: int) -> bool:
        return bool(library().share_blocked(self.it, _packed(here), _packed(there), *moves, now_us))

    def hop_us(self, here: SatelliteId, there: SatelliteId) -> int:
        return int(library().share_hop_us(self.it, _packed(here), _packed(there)))

    def timeout_us(self, here: SatelliteId) -> int:
        return int(library().share_timeout_us(self.it, _packed(here)))

    def counted(self, now_us: int) -> Sequence[int]:
        """Slot moves and plane moves by the clock, and when they next change."""
        out = (ctypes.c_int64 * 3)()
        library().share_counted(self.it, now_us, out)
        return list(out)


class Queues:
    """The queues of a daemon's links, with the interface of ``LinkQueues`` for one that sends at a time."""

    def __init__(self, share: Share) -> None:
        self.it = library().share_queues(share.it)

    def leaves_us(
        self,
        sender: SatelliteId | int,
        receiver: SatelliteId | int,
        size: int,
        now_us: int,
        place: GroundHost | None = None,
        onboard: SatelliteId | None = None,
        urgent: bool = False,
    ) -> int | None:
        """``LinkQueue.leaves_s``, hosts being numbers; None: the link loses it."""
        from_sky, to_sky = isinstance(sender, SatelliteId), isinstance(receiver, SatelliteId)
        kind = 2 if from_sky and to_sky else 1 if from_sky else 0
        here, other = (sender, receiver) if from_sky else (receiver, sender)
        assert isinstance(here, SatelliteId)
        end = _packed(other) if isinstance(other, SatelliteId) else 0xFF000000 | other
        at = None if place is None else (ctypes.c_double * 2)(place.latitude_deg, place.longitude_deg)
        on_it = kind != 2 and here == onboard
        found = library().share_leaves(self.it, kind, _packed(here), end, at, on_it, size, now_us, urgent)
        return None if found == (1 << 63) - 1 else int(found)

    def figures(self, now_us: int) -> list[int]:
        """Packets lost by class, then bytes that wait."""
        out = (ctypes.c_uint64 * 6)()
        library().share_figures(self.it, now_us, out)
        return list(out)


def _packed(satellite: SatelliteId) -> int:
    return satellite.plane << 12 | satellite.slot
