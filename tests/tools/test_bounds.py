"""Lower ends of dependencies are read from where they are said."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.bounds import PROJECT, bounds, lowest

SAID = """[project]
dependencies = ["numpy>=1.26"]

[project.optional-dependencies]
one = ["redis[hiredis]>=5,<9", "numpy>=1.26"]
two = ["uvloop>=0.19; sys_platform != 'win32'", "other~=2.1"]
"""


def test_lower_ends_become_the_version(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(SAID)
    assert bounds(file, "lowest", ["one"]) == ["numpy==1.26", "redis[hiredis]==5"]
    assert bounds(file, "lowest", ["two"]) == ["numpy==1.26", "other==2.1", 'uvloop==0.19; sys_platform != "win32"']
    assert bounds(file, "newest", ["one"]) == ["numpy>=1.26", "redis[hiredis]>=5,<9"]
    with pytest.raises(ValueError, match="no lower end"):
        list(lowest(["anything<3"]))
    with pytest.raises(KeyError):
        bounds(file, "lowest", ["three"])


def test_the_highest_of_several_lower_ends_counts() -> None:
    """Extras are installed together, and pip refuses two versions of one package."""
    said = ["tokenizers>=0.21", "Tokenizers>=0.9.3", "redis[a]>=5", "redis[b]>=4"]
    assert list(lowest(said)) == ["tokenizers==0.21", "redis[a,b]==5"]
    every = bounds(PROJECT, "lowest", ["hf", "fast", "redis", "router", "cachegen", "secure", "envoy"])
    names = [line.partition("==")[0].partition("[")[0] for line in every]
    assert len(set(names)) == len(names)


def test_the_releases_of_transformers_are_said_in_one_way() -> None:
    """By the package's range, and by the check at import."""
    pytest.importorskip("packaging")
    from packaging.requirements import Requirement

    from skymemory.engine.transformers.releases import TRIED_TRANSFORMERS, is_admitted, is_tried

    (said,) = [one for one in bounds(PROJECT, "newest", ["hf"]) if one.startswith("transformers")]
    assert Requirement(said).specifier == Requirement(f"transformers{TRIED_TRANSFORMERS}").specifier
    assert [is_tried(release) for release in ("4.56.2", "4.57.0", "5.24.1", "5.25.0", "6.0")] == [
        release in Requirement(said).specifier for release in ("4.56.2", "4.57.0", "5.24.1", "5.25.0", "6.0")
    ]
    admitted = [is_admitted(release) for release in ("4.56.2", "4.57.0", "5.25.0", "5.99.1", "6.0")]
    assert admitted == [False, True, True, True, False], "a later release is tried with each model"


def test_all_that_the_router_needs_has_a_lower_end() -> None:
    assert len(bounds(PROJECT, "lowest", ["router", "envoy", "fast"])) >= 11
