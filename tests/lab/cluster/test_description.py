"""cluster.toml: what may be said, what is refused and with which words; and what is run of it."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="a cluster has a router")

from skymemory.cli.main import main
from skymemory.errors import InvalidInput
from skymemory.installation import install_command
from skymemory_lab.cluster.description import ROLES, ClusterDescription, description_of, read_description
from skymemory_lab.cluster.on_ray import actor_options
from skymemory_lab.cluster.services import Service, ports_wanted, router_settings, services
from skymemory_lab.sim.sweeps import has_ray

SERVED = {"serve": "memory://64MiB"}
P, D, BOTH = ({"role": role} for role in ROLES)


def described(**parts: Any) -> ClusterDescription:
    return description_of({"instances": [P, D], "store": SERVED, **parts})


def planned(description: ClusterDescription) -> dict[str, Service]:
    free = list(range(50_000, 50_000 + ports_wanted(description)))
    return {one.name: one for one in services(description, "unix:///run/s", "/run/s", "/run/router.toml", free)}


def test_a_whole_cluster_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        """
name = "pd"
[store]
serve = "memory://1GiB"
[[instances]]
name = "fast"
role = "prefill"
count = 2
port = 8101
options = ["--cache", "64MiB"]
environment = { OMP_NUM_THREADS = "2" }
[[instances]]
role = "decode"
[[instances]]
name = "big"
engine = "vllm"
model = "org/model"
python = "/vllm/bin/python"
connector = { value_tokens = 256 }
options = ["--max-model-len", "4096"]
[router]
listen = "127.0.0.1:8080"
settings = { strategy = "least-ttft", health = { every = "2s" } }
""",
        "utf-8",
    )
    found = planned(read_description(file))
    assert list(found) == ["store", "fast-1", "fast-2", "decode-1", "big-1", "router"]  # in this order they start
    fast = found["fast-2"]
    ours = [sys.executable, "-m", "skymemory.cli.main", "--end-with-stdin"]
    assert list(fast.words[:4]) == ours and fast.ends_with_stdin
    expected = "serve --model small --listen 127.0.0.1:8102 --store unix:///run/s --role producer --cache 64MiB"
    assert " ".join(fast.words[4:]) == expected
    assert fast.health == "http://127.0.0.1:8102/health" and fast.environment["OMP_NUM_THREADS"] == "2"
    assert found["decode-1"].words[-2:] == ("--role", "consumer") and ":50000" in found["decode-1"].address
    big = found["big-1"]
    assert big.words[:3] == ("/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    transfer = json.loads(big.words[big.words.index("--kv-transfer-config") + 1])
    assert transfer["kv_role"] == "kv_both" and transfer["kv_connector_extra_config"]["store"] == "unix:///run/s"
    assert transfer["kv_connector_extra_config"]["value_tokens"] == 256 and big.words[-1] == "4096"
    assert not big.ends_with_stdin
    assert found["router"].words[4:] == ("route", "--settings", "/run/router.toml", "--listen", "127.0.0.1:8080")


def test_the_router_s_file_names_roles_only_where_there_are_some() -> None:
    settings = {"strategy": "least-ttft", "cors": {"origins": ["http://a"]}, "options": {'odd "key"\n': 1.5}}
    written = router_settings(
        described(router={"settings": settings}),
        [("prefill-1", "http://127.0.0.1:1", "prefill"), ("both-1", "http://127.0.0.1:2", "both")],
    )
    assert tomllib.loads(written) == {
        **settings,
        "backends": [
            {"name": "prefill-1", "url": "http://127.0.0.1:1", "role": "prefill"},
            {"name": "both-1", "url": "http://127.0.0.1:2"},
        ],
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "no instances: expected"),
        ({"instances": BOTH}, "expected [[instances]] tables"),
        ({"instances": [BOTH], "stor": SERVED}, "did you mean 'store'"),
        ({"instances": [BOTH], "store": "memory"}, "expected a table, [store]"),
        ({"instances": [{"rôle": "both"}]}, "instances, number 1: rôle: unknown setting; did you mean 'role'"),
        ({"instances": [{"role": "decoder"}]}, "did you mean 'decode'"),
        ({"instances": [{"engine": "sglang"}]}, "expected one of skymemory, vllm"),
        ({"instances": [{"count": 0}]}, "expected 1 to 64"),
        ({"instances": [{"count": 65}]}, "expected 1 to 64"),
        ({"instances": [{"name": "Store"}]}, "lower-case letters"),
        ({"instances": [{"name": "router"}]}, "none of constellation, router"),
        ({"instances": [{"port": 65535, "count": 2}]}, "beyond 65535"),
        ({"instances": [{"python": "python3"}]}, "for engine = 'vllm'"),
        ({"instances": [{"resources": {"GPU": "one"}}]}, "resources: 'one': expected a number above 0"),
        ({"instances": [BOTH, BOTH]}, "'both' comes twice"),
        ({"instances": [{"name": "a", "count": 2}, {"name": "a-1"}]}, "'a-1' comes twice"),
        ({"instances": [{"port": 8100, "count": 2}, {"name": "b", "port": 8101}]}, "port 8101 is both both's and b's"),
        ({"instances": [{"port": 8080}], "router": {}}, "port 8080 is both both's and router's"),
        ({"instances": [P, D]}, "prefill: role 'prefill' needs a store"),
        ({"instances": [P], "store": SERVED}, "no instance with role 'decode' or 'both'"),
        ({"instances": [D], "store": SERVED}, "no instance with role 'prefill' or 'both'"),
        ({"instances": [P, {**D, "model": "tinyllama-random"}], "store": SERVED}, "same engine and model"),
        ({"instances": [BOTH], "store": {}}, "one of address, serve and constellation"),
        ({"instances": [BOTH], "store": {**SERVED, "address": "redis://h"}}, "one of address, serve and constellation"),
        ({"instances": [BOTH], "store": {"address": "memory://1GiB"}}, "write serve = 'memory://1GiB'"),
        ({"instances": [{"engine": "vllm", "connector": {"store": "x"}}]}, "the cluster's is used"),
        ({"instances": [BOTH], "router": {"listen": "8080"}}, "not an address to listen at"),
        ({"instances": [BOTH], "router": {"settings": {"backends": []}}}, "written from this description"),
        ({"instances": [BOTH], "router": {"settings": {"strateggy": "x"}}}, "did you mean 'strategy'"),
    ],
)
def test_what_cannot_be_meant_is_refused(content: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        description_of(content)
    assert words in str(refused.value)


def test_a_connector_s_setting_that_it_would_refuse_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidInput, match="value_tokens"):
        planned(described(instances=[{"engine": "vllm", "connector": {"value_tokens": "many"}}]))


def test_what_ray_sets_aside_is_named_as_ray_names_it() -> None:
    (group,) = described(instances=[{"resources": {"CPU": 0.5, "GPU": 2, "memory": 1e9, "fast_link": 1}}]).instances
    found = actor_options(group)
    assert (found["num_cpus"], found["num_gpus"], found["memory"]) == (0.5, 2.0, 1e9)
    assert found["resources"] == {"fast_link": 1.0} and found["max_restarts"] == -1
    (plain,) = described(instances=[BOTH]).instances
    assert actor_options(plain)["num_cpus"] == 1.0 and "num_gpus" not in actor_options(plain)


def test_on_ray_a_store_of_this_computer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = tmp_path / "c.toml", tmp_path / "run"
    on_ray = ["--run-dir", str(run), "--on", "ray"]
    for store in ('address = "unix:///s"', "constellation = []"):
        file.write_text(f"[[instances]]\nengine = 'vllm'\n[store]\n{store}", "utf-8")
        assert main(["cluster", "up", str(file), *on_ray]) == 2
        assert "on Ray expected" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "ray://head:10001")
        assert main(["cluster", "up", str(file), *on_ray]) == 2
    assert "such as 10.0.0.1:6379" in capsys.readouterr().err
    file.write_text("[[instances]]\nengine = 'vllm'", "utf-8")
    if not has_ray():
        assert main(["cluster", "up", str(file), *on_ray]) == 1
        assert install_command("ray") in capsys.readouterr().err
    assert not run.exists()


def test_the_verb_says_what_is_wrong_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "c.toml", tmp_path / "run"
    assert main(["cluster", "up", str(file), "--run-dir", str(run)]) == 2
    file.write_text("instances = [", "utf-8")
    assert main(["cluster", "up", str(file), "--run-dir", str(run)]) == 2
    file.write_text("[[instances]]\nrole = 'decoder'", "utf-8")
    assert main(["cluster", "up", str(file), "--run-dir", str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(str(file) in line for line in errors)
    assert main(["cluster", "status", "--run-dir", str(run)]) == 1
    assert "no cluster runs in" in capsys.readouterr().err
    assert main(["cluster", "down", "--run-dir", str(run)]) == 0
    assert main(["cluster", "logs", "x", "--run-dir", str(run)]) == 2
    assert not run.exists()


def test_elastic_instances_are_started_to_do_both_and_the_router_knows_them() -> None:
    router = {"settings": {"admission": {"ttft": "2s", "tbt": "50ms"}}}
    one = {"role": "prefill", "elastic": True}
    description = described(instances=[one, {**D, "count": 2}], router=router)
    engine = planned(description)["prefill-1"]
    assert engine.words[engine.words.index("--role") + 1] == "both" and engine.role == "prefill"
    backends = [("prefill-0", "http://a:1", "prefill"), ("decode-0", "http://b:1", "decode")]
    found = tomllib.loads(router_settings(description, backends))["backends"]
    assert [each.get("elastic") for each in found] == [True, None]
    for parts, words in (({}, r"elastic: the router changes the roles: expected \[router\]"), ({"router": {}}, "ttft")):
        with pytest.raises(InvalidInput, match=words):
            described(instances=[one, D], **parts)
    with pytest.raises(InvalidInput, match="elastic: set the role that it begins with"):
        described(instances=[{**BOTH, "elastic": True}, D], router=router)
