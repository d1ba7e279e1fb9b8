"""Constellations by name."""

from __future__ import annotations

import pytest

from skymemory.constellation.presets import DEFAULT_PRESET, PRESETS, preset_named
from skymemory.constellation.torus import SatelliteId, Torus
from skymemory.errors import InvalidInput, UnknownPreset


def test_the_six_constellations_of_the_papers() -> None:
    assert list(PRESETS) == ["testbed-19x5", "paper-15x15", "starlink-a", "starlink-b", "kuiper-a", "kuiper-b"]
    assert DEFAULT_PRESET in PRESETS
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.centre in preset.torus
        assert (preset.servers, preset.strategy) == (10, "rotation_hop")


def test_the_testbed_borrows_the_geometry_of_starlink_a_and_says_so() -> None:
    testbed = preset_named("testbed-19x5")
    assert testbed.torus == Torus(planes=5, slots_per_plane=19)
    assert testbed.shell == preset_named("starlink-a", 1).shell
    assert testbed.centre == SatelliteId(2, 9)
    assert "Starlink A" in testbed.description and "reachable" in testbed.description


def test_the_simulation_is_centred_on_satellite_8_of_plane_8() -> None:
    assert preset_named("paper-15x15").centre.label == "sat 8, orb 8"


def test_names_are_read_kindly_and_a_typo_is_answered_with_the_nearest_name() -> None:
    assert preset_named("STARLINK_A") is PRESETS["starlink-a"]
    with pytest.raises(UnknownPreset, match=r"kuiper_c.*did you mean 'kuiper-"):
        preset_named("kuiper_c")
    with pytest.raises(InvalidInput) as error:
        preset_named("?")
    assert "expected one of testbed-19x5" in str(error.value)


def test_the_papers_constellations_keep_their_one_version_and_others_name_theirs() -> None:
    assert {name: preset.version for name, preset in PRESETS.items() if preset.fixed_centre is not None} == {
        "testbed-19x5": 1,
        "paper-15x15": 1,
    }
    assert preset_named("kuiper-a").version == 2 and preset_named("kuiper-a", 1).shell.model == "paper"
    for name, version in (("kuiper-a", 3), ("paper-15x15", 2), ("starlink-b", 0)):
        with pytest.raises(UnknownPreset, match=f"version {version} of constellation preset {name}: expected 1 to"):
            preset_named(name, version)
