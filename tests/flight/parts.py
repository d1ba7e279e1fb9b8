"""The parts of the satellite in C (``flight/core``) for tests: ``parts.c`` and the core as one library.

``FLIGHT_SANITIZE=1`` compiles it with ASan and UBSan; then ``LD_PRELOAD`` must name the compiler's libasan.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flight" / "core"
BUILD = ROOT / "build" / "flight" / "tests"
NEVER_US = (1 << 63) - 1
NOWHERE = 0xFFFFFFFF
_STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if not found:
        pytest.skip("no C compiler: the satellite in C is not tested")
    return found


def _build() -> Path:
    """Compiled, file by file, where something is newer."""
    sanitized = _SANITIZE if os.environ.get("FLIGHT_SANITIZE") else ()
    folder = BUILD / ("parts-sanitized" if sanitized else "parts")
    folder.mkdir(parents=True, exist_ok=True)
    sources = [CORE / "config.c", *sorted(CORE.glob("*/*.c")), Path(__file__).with_name("parts.c")]
    headers_s = max(path.stat().st_mtime for path in CORE.glob("**/*.h"))
    objects, running = [], []
    for source in sources:
        made = folder / f"{source.parent.name}-{source.stem}.o"
        objects.append(str(made))
        if made.exists() and made.stat().st_mtime > max(source.stat().st_mtime, headers_s):
            continue
        strict = ("-std=gnu99",) if source.name == "parts.c" else _STRICT
        part = made.with_suffix(f".{os.getpid()}")
        command = (_compiler(), *strict, "-O2", "-fPIC", *sanitized, f"-I{CORE}", "-c", str(source), "-o", str(part))
        running.append((part, made, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    for part, made, process in running:
        _, said = process.communicate()
        assert process.returncode == 0, said
        part.replace(made)
    library = folder / "libparts.so"
    if running or not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        subprocess.run((_compiler(), *sanitized, "-shared", "-o", str(part), *objects, "-lm"), check=True)
        part.replace(library)
    return library


@lru_cache(maxsize=1)
def library() -> Any:
    """The library, with the types of its functions; the test is skipped where there is no C compiler."""
    _compiler()
    lib = ctypes.CDLL(str(_build()))
    data, it, void = ctypes.c_void_p, ctypes.c_void_p, None
    i32, i64, u16, u32, size = ctypes.c_int, ctypes.c_int64, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_size_t
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "sky_crc32": (u32, (u32, data, size)),
        "sky_packet_verify": (i32, (data, size)),
        "sky_packet_check": (i32, (data, size)),
        "sky_body_check": (ctypes.c_bool, (ctypes.c_uint8, data, size)),
        "sky_same_journey": (ctypes.c_bool, (data, size, size)),
        "sky_count_hops": (ctypes.c_bool, (data, size, size)),
        "sky_mac_strip": (void, (data, size)),
        "sky_sha_begin": (void, (data,)),
        "sky_sha_take": (void, (data, data, size)),
        "sky_sha_end": (void, (data, data)),
        "parts_parse": (i64, (data, size, data)),
        "parts_rebuild": (size, (data, size, i64, data)),
        "parts_cover": (u32, (data, data, u32, u32, data, size, data)),
        "parts_next_hop": (u32, (u32, u32, u32, u32, i32, i32)),
        "parts_neighbour": (u32, (u32, u32, u32, i32)),
        "parts_hops": (u32, (u32, u32, u32, u32)),
        "parts_placing": (it, (data,)),
        "parts_locate": (u32, (it, data, ctypes.c_int32, ctypes.c_int32)),
        "parts_layout": (i32, (it, u32, u32, data, data)),
        "parts_all_places": (u32, (it, u32, u32, ctypes.c_int32, ctypes.c_int32, data)),
        "parts_clock": (it, (ctypes.c_char_p, i32, data)),
        "parts_counted": (void, (it, i64, data)),
        "parts_locator": (it, (data,)),
        "parts_moves_since": (u32, (it, u32, u32, ctypes.c_int32, ctypes.c_int32, i64, data, u32)),
        "parts_follow": (void, (it, i64, data)),
        "parts_push": (i32, (it, ctypes.c_int32, ctypes.c_int32, i64, ctypes.c_int32)),
        "parts_home": (u32, (it, data)),
        "parts_memory": (it, (data,)),
        "parts_memory_end": (void, (it,)),
        "parts_memory_bytes": (size, (it,)),
        "parts_memory_resident": (size, (it,)),
        "parts_put": (void, (it, data, data, u32, i32, data)),
        "parts_put_run": (i32, (it, data, data, u32, i32, data)),
        "parts_get": (i64, (it, data, u32, data, data)),
        "parts_verb": (i64, (it, i32, data, i64, i64)),
        "parts_remove_setting": (u32, (it, data, data, i32)),
        "parts_outdated": (void, (it, u32)),
        "parts_hold": (void, (it, i32)),
        "parts_presence": (void, (it, data, data)),
        "parts_figures": (void, (it, data)),
        "parts_order": (u32, (it, data)),
        "parts_list": (u32, (it, i32, data)),
        "parts_refs": (u32, (it, data, data)),
        "parts_conflicts": (u32, (it, data)),
        "parts_pieces": (u32, (it, data, u32)),
        "parts_after": (u32, (it, data)),
        "parts_ranking": (it, (data,)),
        "parts_rank": (i64, (it, i32, data)),
        "parts_ranked": (u32, (it, data)),
        "parts_mean_return": (ctypes.c_double, (it,)),
        "parts_history": (it, (data,)),
        "parts_recall": (i32, (it, i32, data, data, i64)),
        "parts_sign": (size, (u32, data, data, i32, data, size, data, size, size, i64)),
        "parts_mac": (i64, (u32, data, data, i32, data, size, i64, i64)),
        "parts_hmac": (void, (data, data, size, data)),
        "parts_gate": (it, (u32, u32, data, data, i32, data, i64)),
        "parts_admit": (u32, (it, data, size, size, u32, i64, data)),
        "parts_gated": (void, (it, data)),
        "parts_replay": (it, (data,)),
        "parts_first": (i32, (it, u32, u32, u32, i64, u32)),
    }
    del u16
    for name, (result, arguments) in types.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def numbers(values: Sequence[int]) -> Any:
    """An array of signed 64-bit numbers."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def exact(data: bytes) -> Any:
    """The bytes in memory of just their size: a reader beyond them is caught by a sanitizer."""
    return (ctypes.c_uint8 * len(data)).from_buffer_copy(data) if data else (ctypes.c_uint8 * 0)()


def us(time_s: float) -> int:
    return NEVER_US if time_s == float("inf") else round(time_s * 1e6)
