"""Plan file ``constellation.json``: editable, replaced atomically, parsed strictly."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from skymemory.config import parse_json, suggestion, table
from skymemory.constellation.ground_track import Waypoint
from skymemory.constellation.links import Links
from skymemory.constellation.presets import FlownShell
from skymemory.constellation.torus import SatelliteId
from skymemory.errors import ConstellationError, InvalidInput, LaterFile
from skymemory.files import read_bounded, read_text, write_private
from skymemory.protocol.client.gateway import IDEAL_ONCE
from skymemory.testbed.plan import ConstellationPlan, Faults, Ground, HostShare, MemoryPolicy
from skymemory.transport.unix_clock import boot_id

Part = TypeVar("Part", ConstellationPlan, HostShare, Faults, MemoryPolicy, Ground)
FORMAT_VERSION = 1
CLOCK_NAME = "clock.json"
_MAX_CLOCK_BYTES = 4096
_POLL_S = 0.02


def to_json(plan: ConstellationPlan) -> str:
    fields = dataclasses.asdict(plan)
    if plan.access == "ideal":
        fields["access"] = IDEAL_ONCE  # the name that every release reads
    fields["centre"] = {"plane": plan.centre.plane, "slot": plan.centre.slot}
    # Readers refuse unknown keys: a key that earlier versions do not know is written only if the plan needs it.
    for host in fields["hosts"]:
        if not host["skipped_ports"]:
            del host["skipped_ports"]
    if not plan.fan_out:
        del fields["fan_out"]
    if plan.links is None:
        del fields["links"]
    else:
        fields["links"] = plan.links.as_table()
    if plan.flown is None:
        del fields["flown"]
    else:
        del fields["flown"]["star"]  # no plan with a file is a star
    if plan.preset_version == 1:
        del fields["preset_version"]
    del fields["unix_at_boot_s"]
    return json.dumps({"version": FORMAT_VERSION, **fields}, indent=2) + "\n"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check_keys(table: Mapping[str, Any], kind: type, where: str) -> None:
    """Refuse unknown and missing keys: a typo would start another constellation."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.compare}
    for key in table:
        if key not in fields:
            raise InvalidInput(f"{where}: unknown key {key!r}; {suggestion(key, fields)}")
    missing = [name for name, field in fields.items() if name not in table and _is_required(field)]
    if missing:
        raise InvalidInput(f"{where}: missing {', '.join(missing)}")


_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def _check_types(table: Mapping[str, Any], kind: type, where: str) -> None:
    for field in dataclasses.fields(kind):
        expected = _TYPES.get(str(field.type))
        if field.name not in table or expected is None:
            continue
        value = table[field.name]
        if not isinstance(value, expected) or isinstance(value, bool):
            wanted = "a number" if float in expected else str(field.type)
            raise InvalidInput(f"{where}: {field.name} is {value!r}: expected {wanted}")


def _mapping(value: Any, kind: type, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where}: expected an object of keys and values, found {type(value).__name__}")
    _check_keys(value, kind, where)
    _check_types(value, kind, where)
    return dict(value)


def _build(kind: type[Part], fields: dict[str, Any], where: str) -> Part:
    try:
        return kind(**fields)
    except InvalidInput as error:
        raise type(error)(f"{where}: {error}") from error


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise InvalidInput(f"{where}: expected a list of whole numbers, found {value!r}")
    return tuple(value)


def from_json(text: str, where: str = "constellation.json") -> ConstellationPlan:
    """Parse a plan; errors (``InvalidInput``) begin with ``where``."""
    try:
        content = parse_json(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{where}: expected an object of keys and values, found {type(content).__name__}")
    version = content.pop("version", None)
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise LaterFile(
            f"{where}: version {version}: this program reads version {FORMAT_VERSION}; a later release wrote it"
        )
    if version != FORMAT_VERSION:
        raise InvalidInput(f"{where}: version {version!r}: this program reads version {FORMAT_VERSION}")
    fields = _mapping(content, ConstellationPlan, where)
    if not isinstance(fields["hosts"], list):
        raise InvalidInput(f"{where}: hosts: expected a list of hosts")
    hosts = []
    for number, share in enumerate(fields["hosts"]):
        host = _mapping(share, HostShare, f"{where}: hosts[{number}]")
        host["planes"] = _numbers(host["planes"], f"{where}: hosts[{number}].planes")
        gaps = host.get("skipped_ports", [])
        if not isinstance(gaps, list):
            raise InvalidInput(f"{where}: hosts[{number}].skipped_ports: expected a list of [first, last]")
        host["skipped_ports"] = tuple(_numbers(gap, f"{where}: hosts[{number}].skipped_ports") for gap in gaps)
        hosts.append(_build(HostShare, host, where))
    centre = fields["centre"]
    if not isinstance(centre, dict) or set(centre) != {"plane", "slot"}:
        raise InvalidInput(f"{where}: centre: expected an object with plane and slot, found {centre!r}")
    fields["centre"] = SatelliteId(*_numbers([centre["plane"], centre["slot"]], f"{where}: centre"))
    fields["hosts"] = tuple(hosts)
    if "faults" in fields:
        fields["faults"] = _build(Faults, _mapping(fields["faults"], Faults, f"{where}: faults"), where)
    if "memory_policy" in fields:
        policy = _mapping(fields["memory_policy"], MemoryPolicy, f"{where}: memory_policy")
        fields["memory_policy"] = _build(MemoryPolicy, policy, where)
    if fields.get("links") is not None:
        fields["links"] = Links.read(table(fields["links"]), f"{where}: links")
    if fields.get("flown") is not None:
        fields["flown"] = _flown(fields["flown"], f"{where}: flown")
    if "ground" in fields:
        fields["ground"] = _ground(fields["ground"], f"{where}: ground")
    return _build(ConstellationPlan, fields, where)


def _flown(value: Any, where: str) -> FlownShell:
    fields = _mapping(value, FlownShell, where)
    for name in ("nodes_rad", "offsets_slots"):
        numbers = fields[name]
        if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
            raise InvalidInput(f"{where}: {name}: expected a list of numbers, found {numbers!r}")
        fields[name] = tuple(numbers)
    gaps = fields["gaps"]
    if not isinstance(gaps, list) or not all(isinstance(gap, list) and len(gap) == 2 for gap in gaps):
        raise InvalidInput(f"{where}: gaps: expected a list of [plane, slot]")
    fields["gaps"] = tuple(SatelliteId(*_numbers(gap, f"{where}: gaps")) for gap in gaps)
    flown = FlownShell(**fields)
    try:
        flown.preset()
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error
    return flown


def _ground(value: Any, where: str) -> Ground:
    fields = _mapping(value, Ground, where)
    points = fields.get("waypoints", [])
    if not isinstance(points, list):
        raise InvalidInput(f"{where}: waypoints: expected a list of [seconds, latitude, longitude]")
    for point in points:
        if not (isinstance(point, list) and len(point) == 3 and all(type(part) in (int, float) for part in point)):
            raise InvalidInput(f"{where}: waypoint {point!r}: expected [seconds, latitude, longitude]")
    fields["waypoints"] = tuple(Waypoint(*point) for point in points)
    return _build(Ground, fields, where)


def load_plan(path: Path) -> ConstellationPlan:
    try:
        plan = from_json(read_text(path), str(path))
        folder = path.absolute().parent
        keys_file = str(folder / plan.keys_file) if plan.keys_file else ""
        return dataclasses.replace(plan, keys_file=keys_file, unix_at_boot_s=read_clock(folder / CLOCK_NAME))
    except OSError as error:
        raise InvalidInput(f"cannot read the plan {path}: {error.strerror}") from error


# --- Clock of a constellation on one computer ---
#
# A file next to the plan holds the origin of its processes' time: processes that start after the wall clock was set
# agree with earlier processes. It is valid until the computer restarts: then none of these processes lives any more.


def write_clock(path: Path, unix_at_boot_s: float) -> None:
    write_private(path, json.dumps({"boot": boot_id(), "unix_at_boot_s": unix_at_boot_s}) + "\n")


def read_clock(path: Path) -> float | None:
    """Return the origin of time since this computer's start, if known."""
    boot = boot_id()
    try:
        content = json.loads(read_bounded(path, _MAX_CLOCK_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    match content:
        case {"boot": str(recorded), "unix_at_boot_s": float(unix_at_boot_s)} if recorded == boot and boot:
            return unix_at_boot_s if math.isfinite(unix_at_boot_s) else None
    return None


@contextmanager
def one_at_a_time(path: Path, patience_s: float = 60.0) -> Iterator[None]:
    """Lock the plan's folder for this computer's processes, without a file.

    Raises:
        ConstellationError: locked for ``patience_s``.
    """
    deadline_s = time.monotonic() + patience_s
    handle = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    raise ConstellationError(
                        f"another skymemory command is moving the constellation of {path}"
                    ) from error
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(handle)


def save_plan(plan: ConstellationPlan, path: Path) -> None:
    if not path.name:
        raise InvalidInput(f"cannot write the plan {path}: it is a folder, expected a file's name")
    keys_file = Path(plan.keys_file)
    if plan.keys_file and keys_file.parent == path.absolute().parent:  # relative, so that both can be copied together
        plan = dataclasses.replace(plan, keys_file=keys_file.name)
    try:
        write_private(path, to_json(plan))
    except OSError as error:
        raise InvalidInput(f"cannot write the plan {path}: {error.strerror}") from error
