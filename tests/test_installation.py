"""Commands that install what is missing: one for each way in which SkyMemory may have been installed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import skymemory
from skymemory import installation
from skymemory.engine.inputs import small_model_folder
from skymemory.errors import MissingExtra

ROOT = Path(__file__).parents[1]
BARE_NAME = re.compile(
    r"""\b(?:pip|pipx|uv|poetry)3?\s+(?:[a-z]+\s+)*?(?:install|add|download|wheel)\b[^\n|;&]*?"""
    r"""(?<![\w./'"-])['"]?skymemory(?:-small-model|_small_model)?(?:\[[^\]\n]*\])?['"]?(?!\s*@)(?=$|[\s`,.;:)<=>~!])""",
    re.M,
)


def _noted(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    """Sets the code up as one that runs from no checkout and that an installer left ``origin`` for."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(installation, "find_checkout", lambda: None)
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())


def _requirement(command: str) -> str:
    words = shlex.split(command)
    return words[words.index("install") + 1]


def test_in_a_checkout_its_folder_is_named_for_any_directory() -> None:
    words = shlex.split(installation.install_command("hf", "router"))
    assert words[-2:] == ["-e", f"{ROOT}[hf,router]"]
    assert shlex.split(installation.small_model_command())[-1] == str(ROOT / "models" / "small")
    assert small_model_folder() == ROOT / "models" / "small" / "skymemory_small_model"


@pytest.mark.parametrize("name", ["skymemory-0.1.0-cp311-abi3-linux_x86_64.whl", "skymemory-0.1.0.tar.gz"])
def test_an_installed_file_is_named_though_its_path_has_blanks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "what I got" / name
    file.parent.mkdir()
    file.touch()
    _noted(monkeypatch, {"url": file.as_uri(), "archive_info": {}})
    assert _requirement(installation.install_command("redis")) == f"{file}[redis]"
    if name.endswith(".tar.gz"):
        wanted = f"skymemory-small-model @ {file.as_uri()}#subdirectory=models/small"
    else:
        (model := file.with_name("skymemory_small_model-0.1.0-py3-none-any.whl")).touch()
        wanted = str(model)
    assert _requirement(installation.small_model_command()) == wanted


def test_of_several_wheels_that_of_the_same_release_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "skymemory-0.2.0-cp311-abi3-linux_x86_64.whl").touch()
    for release in ("0.1.0", "0.2.0", "0.10.0"):
        (tmp_path / f"skymemory_lab-{release}-py3-none-any.whl").touch()
    _noted(monkeypatch, {"url": file.as_uri(), "archive_info": {}})
    assert _requirement(installation.laboratory_command()) == str(tmp_path / "skymemory_lab-0.2.0-py3-none-any.whl")


def test_a_checkout_that_was_installed_by_a_copy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    _noted(monkeypatch, {"url": tmp_path.as_uri(), "dir_info": {}})
    assert _requirement(installation.install_command("redis")) == f"{tmp_path}[redis]"
    assert _requirement(installation.small_model_command()) == str(tmp_path / "models" / "small")


def test_a_repository_or_a_page_is_named_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _noted(monkeypatch, {"url": "https://host/sky.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert _requirement(installation.install_command("redis")) == "skymemory[redis] @ git+https://host/sky.git@abc"
    assert _requirement(installation.small_model_command()).endswith("sky.git@abc#subdirectory=models/small")
    _noted(monkeypatch, {"url": "https://host/skymemory.whl", "archive_info": {}})
    assert _requirement(installation.install_command("redis")) == "skymemory[redis] @ https://host/skymemory.whl"


def test_the_command_is_typed_by_its_path_unless_its_environment_is_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "skymemory").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert installation.command_word() == ".venv/bin/skymemory"
    monkeypatch.chdir(tmp_path.parent)
    assert installation.command_word() == f"{tmp_path.name}/.venv/bin/skymemory"
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert installation.command_word() == str(folder / "skymemory")
    monkeypatch.setenv("PATH", str(folder))
    assert installation.command_word() == "skymemory"


def test_make_is_called_where_its_makefile_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert installation.make_command("flight") == "`make flight`"
    monkeypatch.chdir(tmp_path)
    assert installation.make_command("flight") == f"`make -C {shlex.quote(str(ROOT))} flight`"
    _noted(monkeypatch, {"url": tmp_path.as_uri(), "dir_info": {}})
    (tmp_path / "Makefile").touch()
    monkeypatch.chdir("/")
    assert installation.make_command("flight") == f"`make -C {shlex.quote(str(tmp_path))} flight`"
    _noted(monkeypatch, {"url": "https://host/skymemory.whl", "archive_info": {}})
    assert "source distribution" in installation.make_command("flight")


def test_no_error_calls_make_without_its_folder() -> None:
    """Pages of help speak of the checkout; errors are read in any folder."""
    bare = re.compile(r"raise \w+\((?:[^()]|\([^()]*\))*`make ", re.S)
    sources = (ROOT / "src" / "skymemory").rglob("*.py")
    assert [path.name for path in sources if bare.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("origin", [None, {"url": "file:///no/such/skymemory.whl", "archive_info": {}}])
def test_where_nothing_is_known_no_name_is_given_that_an_index_may_have(
    origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _noted(monkeypatch, origin)
    for command in (installation.install_command("redis"), installation.small_model_command()):
        assert "./FILE" in command and not BARE_NAME.search(command)
    assert ("/no/such/skymemory.whl is no longer there" in installation.install_command("redis")) is (
        origin is not None
    )


def test_the_command_is_for_this_environment_though_it_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert installation.install_command("redis").startswith(f"{shlex.quote(sys.executable)} -m pip install ")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert installation.install_command("redis").startswith("pip install ")
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    assert installation.install_command("redis").startswith(f"uv pip install --python {shlex.quote(sys.executable)} ")


def test_without_the_small_model_its_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymemory.engine.inputs.find_checkout", lambda: None)
    monkeypatch.setattr("skymemory.engine.inputs.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"the small model is not installed: .*models/small"):
        small_model_folder()


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [
        ("pip install skymemory", True),
        ("pip install -U 'skymemory[hf]'", True),
        ("python -m pip install skymemory-small-model==0.1.0", True),
        ('uv pip install "skymemory[hf]>=0.1"', True),
        ("run `pip install skymemory`.", True),
        ("pip install -e '.[hf]'", False),
        ("pip install 'dist/skymemory-0.1.0-cp311-abi3-linux_x86_64.whl[hf]'", False),
        ("pip install 'skymemory[hf] @ git+https://host/sky.git'", False),
        ("pip install /opt/skymemory", False),
        ("/opt/skymemory/bin/pip install '.[router]'", False),
    ],
)
def test_the_search_for_bare_names_finds_them_and_nothing_else(text: str, is_bare: bool) -> None:
    assert bool(BARE_NAME.search(text)) is is_bare


def test_the_bare_name_is_installed_in_no_text() -> None:
    """An index may have a package of that name, which is not ours."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not in a git repository")
    names = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    assert Path("README.md") in names
    found = []
    for name in names:
        if name == Path(__file__).relative_to(ROOT) or name.suffix in {".png", ".svg", ".safetensors", ".bin"}:
            continue
        if (ROOT / name).is_file():
            text = (ROOT / name).read_bytes().decode("utf-8", "replace")
            text = re.sub(r"(pip install)\s*\n[\s#*]*", r"\1 ", text)  # a command that a paragraph's line breaks
            found += [f"{name}: {match[0]}" for match in BARE_NAME.finditer(text)]
    assert found == []


def test_a_public_name_that_lacks_its_extra_names_the_command(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import skymemory\n"
        "try: skymemory.KVCManager\n"
        "except skymemory.errors.MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "skymemory.KVCManager needs torch" in done.stdout and f"{ROOT}[hf]" in done.stdout
    assert skymemory.__version__ in (ROOT / "pyproject.toml").read_text("utf-8")
