"""Every key of a scenario is obeyed or refused, by each engine: it changes the results, or there are none."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.constellation import synthetic

from skymemory.config import known_keys
from skymemory.constellation.links import Links, Outage, Rain
from skymemory.errors import InvalidInput
from skymemory_lab.sim.sky import Scenario, run
from skymemory_lab.sim.sky.scenario import (
    ENGINES,
    NOT_OF,
    GroundTable,
    MemoryTable,
    PlacementTable,
    ShellTable,
    WorkloadTable,
)

SCHEMA = {
    "": Scenario,
    "shell": ShellTable,
    "ground.0": GroundTable,
    "links": Links,
    "links.outage.0": Outage,
    "links.rain": Rain,
    "placement": PlacementTable,
    "memory": MemoryTable,
    "workload": WorkloadTable,
}
SHELL = {"planes": 12, "slots": 10, "altitude_km": 1200, "inclination_deg": 53, "phase": 5}
BERLIN = {"name": "berlin", "lat": 52.5, "lon": 13.4}
BASE: dict[str, Any] = {
    "duration": "12s",
    "shell": SHELL,
    "ground": [BERLIN],
    "links": {"up": "300Mbit", "down": "1.2Gbit", "isl": "20Gbit"},
    "placement": {"servers": 4},
    "workload": {"rate": 1.0, "keys": 4, "size": ["24KiB", "60000"]},
}
DENSE = SHELL | {"planes": 20, "slots": 16}
RAIN = {"rate": 60, "share": 0.7, "spell": "5s", "margin_db": 0.5}
OUTAGE = {"link": "beams", "from": "2s", "to": "8s"}
ELEMENTS = {"tle": "sky.tle"}
TRACE = {"trace": "trace.jsonl", "size": "24KiB"}
Change = tuple[dict[str, Any], dict[str, Any]]
"""Two scenarios, by the tables that differ from ``BASE``."""


def one(section: str, key: str, *values: Any, **beside: Any) -> Change:
    """Two values of a key; None: without it."""
    first, second = ({**beside, **({} if value is None else {key: value})} for value in values)
    return ({section: first}, {section: second}) if section else (first, second)


def link(**tables: Any) -> dict[str, Any]:
    return {"links": BASE["links"] | tables}


CHANGES: dict[str, Change] = {
    "title": one("", "title", "a", "b"),
    "engine": one("", "engine", *ENGINES),
    "duration": one("", "duration", "12s", "8s"),
    "start": one("", "start", 0, "5min"),
    "mask": one("", "mask", 25, 50, shell=DENSE, ground=[BERLIN | {"access": "hybrid"}]),
    "gateway": one("", "gateway", "climbing", "nearest", shell=DENSE, duration="2min"),
    "shell.preset": ({"shell": {"preset": "kuiper-a"}}, {"shell": {"preset": "starlink-a"}}),
    "shell.tle": ({"shell": ELEMENTS}, {}),
    "shell.number": ({"shell": ELEMENTS}, {"shell": ELEMENTS | {"number": 2}}),
    "shell.skip_bad": ({"shell": {"tle": "bad.tle"}}, {"shell": {"tle": "bad.tle", "skip_bad": True}}),
    "shell.planes": ({}, {"shell": SHELL | {"planes": 14}}),
    "shell.slots": ({}, {"shell": SHELL | {"slots": 12}}),
    "shell.altitude_km": ({}, {"shell": SHELL | {"altitude_km": 1000}}),
    "shell.inclination_deg": ({}, {"shell": SHELL | {"inclination_deg": 60}}),
    "shell.phase": ({}, {"shell": SHELL | {"phase": 2}}),
    "shell.pattern": ({}, {"shell": SHELL | {"pattern": "star", "inclination_deg": 80, "phase": 0}, "start": "10min"}),
    "ground.0.name": ({}, {"ground": [BERLIN | {"name": "bonn"}]}),
    "ground.0.lat": ({}, {"ground": [BERLIN | {"lat": 47.5}]}),
    "ground.0.lon": ({}, {"ground": [BERLIN | {"lon": 33.4}]}),
    "ground.0.access": ({}, {"ground": [BERLIN | {"access": "hybrid"}]}),
    "links.up": ({}, link(up="100Mbit")),
    "links.down": ({}, link(down="100Mbit")),
    "links.isl": ({}, link(isl="100Mbit")),
    "links.load": ({}, link(load={"down": 0.9})),
    "links.buffer": (
        link(down="2Mbit") | {"workload": {"size": "400KB"}},
        link(down="2Mbit", buffer="64KiB") | {"workload": {"size": "400KB"}},
    ),
    "links.handover_gap": ({"duration": "4min"}, link(handover_gap="8s") | {"duration": "4min"}),
    "links.outage": ({}, link(outage=[OUTAGE])),
    "links.elevations": ({}, link(elevations=[[0, 0.1], [89, 0.2]])),
    "links.rain": ({}, link(rain=RAIN)),
    "links.seed": (link(rain=RAIN), link(rain=RAIN, seed=3)),
    "links.outage.0.link": (link(outage=[OUTAGE]), link(outage=[OUTAGE | {"link": "isl"}])),
    "links.outage.0.from": (link(outage=[OUTAGE]), link(outage=[OUTAGE | {"from": "7s"}])),
    "links.outage.0.to": (link(outage=[OUTAGE]), link(outage=[OUTAGE | {"to": "3s"}])),
    "links.rain.rate": (link(rain=RAIN), link(rain=RAIN | {"rate": 150})),
    "links.rain.share": (link(rain=RAIN), link(rain=RAIN | {"share": 0.1})),
    "links.rain.spell": (link(rain=RAIN), link(rain=RAIN | {"spell": "1s"})),
    "links.rain.down_ghz": (link(rain=RAIN), link(rain=RAIN | {"down_ghz": 60})),
    "links.rain.up_ghz": (link(rain=RAIN), link(rain=RAIN | {"up_ghz": 60})),
    "links.rain.margin_db": (link(rain=RAIN), link(rain=RAIN | {"margin_db": 30})),
    "links.rain.height_km": (link(rain=RAIN), link(rain=RAIN | {"height_km": 6})),
    "placement.strategy": ({}, {"placement": {"servers": 4, "strategy": "hop"}}),
    "placement.servers": ({}, {"placement": {"servers": 9}}),
    "placement.chunk": ({}, {"placement": {"servers": 4, "chunk": 2048}}),
    "memory.per_satellite": ({}, {"memory": {"per_satellite": "20KiB"}}),
    "memory.replacement": (
        {"memory": {"per_satellite": "30KiB", "replacement": "lru"}, "duration": "40s", "workload": {"keys": 9}},
        {"memory": {"per_satellite": "30KiB", "replacement": "lfuda"}, "duration": "40s", "workload": {"keys": 9}},
    ),
    "memory.eviction": (
        {"memory": {"per_satellite": "30KiB", "eviction": "none"}, "duration": "40s", "workload": {"keys": 9}},
        {"memory": {"per_satellite": "30KiB", "eviction": "gossip"}, "duration": "40s", "workload": {"keys": 9}},
    ),
    "memory.server_time": ({}, {"memory": {"server_time": "1ms"}}),
    "workload.rate": ({}, {"workload": {"rate": 2.0, "keys": 4}}),
    "workload.put": ({}, {"workload": {"put": 0.9, "keys": 4}}),
    "workload.size": ({}, {"workload": {"size": "8KiB"}}),
    "workload.keys": ({}, {"workload": {"keys": 2}}),
    "workload.zipf": ({}, {"workload": {"zipf": 5, "keys": 4}}),
    "workload.seed": ({}, {"workload": {"seed": 1}}),
    "workload.trace": ({}, {"workload": TRACE}),
    "workload.requests": ({"workload": TRACE}, {"workload": TRACE | {"requests": 1}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("scenario")
    export_tle = pytest.importorskip("sgp4.exporter").export_tle
    first, _, _ = synthetic.shell(random.Random(5), 8, 12, 3, gap_share=0.0, altitude_m=1200e3)
    second, _, _ = synthetic.shell(
        random.Random(6), 9, 11, 2, gap_share=0.0, altitude_m=900e3, inclination_deg=70.0, first_number=500
    )
    lines = [line for one in (*first, *second) for line in (one.name, *export_tle(one.satrec))]
    (found / "sky.tle").write_text("\n".join(lines) + "\n")
    (found / "bad.tle").write_text("\n".join([*lines, "bad", lines[1][:-1] + "x", lines[2]]) + "\n")
    requests = [
        {"timestamp": at * 1_000, "input_length": 512, "output_length": 1, "hash_ids": [at % 2]} for at in range(4)
    ]
    (found / "trace.jsonl").write_text("\n".join(map(json.dumps, requests)), "utf-8")
    return found


def outcome(changes: dict[str, Any], engine: str, folder: Path) -> str:
    """The results, or why there are none."""
    table = copy.deepcopy(BASE) | {"engine": engine}
    for key, value in changes.items():
        base = table.get(key)
        merge = isinstance(value, dict) and isinstance(base, dict) and key not in ("shell", "links")
        if key == "workload" and "trace" in value:
            merge = False
        table[key] = base | value if merge else value
    try:
        return run(Scenario.of(table, folder=folder), way="sequence").as_json()
    except InvalidInput as error:
        return f"refused: {error}"


def paths() -> list[str]:
    return [f"{section}.{key}".lstrip(".") for section, kind in SCHEMA.items() for key in known_keys(kind)]


def test_there_is_a_change_of_every_key() -> None:
    assert set(CHANGES) == set(paths())


def is_refused(path: str, engine: str) -> bool:
    return any(f"{path}.".startswith(f"{unused}.") for unused in NOT_OF[engine])  # type: ignore[index]


@pytest.mark.parametrize("engine", [pytest.param("machines", marks=pytest.mark.slow), "model"])
@pytest.mark.parametrize("path", CHANGES)
def test_a_key_changes_the_results_or_is_refused(path: str, engine: str, folder: Path) -> None:
    first, second = (outcome(changes, engine, folder) for changes in CHANGES[path])
    if is_refused(path, engine):
        assert second.startswith("refused: ") and "no effect with engine" in second
        assert ".".join(path.split(".")[:2]) in second
    else:
        assert not (first.startswith("refused") and second.startswith("refused")), (first, second)
        assert path == "shell.skip_bad" or not second.startswith("refused"), second
        assert first != second


def test_outages_and_rain_are_no_part_of_the_model_and_say_so(folder: Path) -> None:
    said = outcome(link(outage=[OUTAGE], rain=RAIN), "model", folder)
    assert said == (
        'refused: scenario: links.outage, links.rain: no effect with engine = "model"; leave them out, or use '
        'engine = "machines"'
    )
