"""The manifests of a described cluster fit together, and are YAML that says the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("aiohttp", reason="a cluster has a router")

from skymemory.cli.main import build_parser, main
from skymemory.errors import InvalidInput
from skymemory_lab.cluster.description import description_of
from skymemory_lab.cluster.manifests import as_yaml, manifests

CONTENT: dict[str, Any] = {
    "name": "pd",
    "store": {"address": "redis://cache:6379"},
    "instances": [
        {"role": "prefill", "count": 2, "options": ["--cache", "1GiB"]},
        {"role": "decode", "environment": {"OMP_NUM_THREADS": "4"}},
        {"name": "big", "engine": "vllm", "model": "org/model"},
    ],
    "router": {"settings": {"strategy": "least-ttft"}},
    "kubernetes": {"engine_image": "engine:1", "vllm_image": "vllm:1", "gpus": 1},
}


def made(**parts: Any) -> list[dict[str, Any]]:
    return manifests(description_of({**CONTENT, **parts}))


def the(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def test_each_object_is_named_once_and_selects_its_own_pods() -> None:
    objects = made()
    named = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(named)) == len(named) == 3 * 2 + 1 + 3
    for each in objects:
        if each["kind"] not in ("StatefulSet", "Deployment"):
            continue
        template = each["spec"]["template"]
        labels = template["metadata"]["labels"]
        service = the(objects, "Service", each["metadata"]["name"])["spec"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert service["selector"].items() <= labels.items()
        (container,) = template["spec"]["containers"]
        assert [port["name"] for port in container["ports"]] == [port["targetPort"] for port in service["ports"]]
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounts == {volume["name"] for volume in template["spec"].get("volumes", ())}


def test_the_router_knows_each_instance_by_its_name_and_role() -> None:
    objects = made()
    written = tomllib.loads(the(objects, "ConfigMap", "pd-router")["data"]["router.toml"])
    assert written == {
        "strategy": "least-ttft",
        "backends": [
            {"name": "prefill-0", "url": "http://pd-prefill-0.pd-prefill:8000", "role": "prefill"},
            {"name": "prefill-1", "url": "http://pd-prefill-1.pd-prefill:8000", "role": "prefill"},
            {"name": "decode-0", "url": "http://pd-decode-0.pd-decode:8000", "role": "decode"},
            {"name": "big-0", "url": "http://pd-big-0.pd-big:8000"},
        ],
    }
    for name, count in (("pd-prefill", 2), ("pd-decode", 1), ("pd-big", 1)):
        spec = the(objects, "StatefulSet", name)["spec"]
        assert (spec["serviceName"], spec["replicas"]) == (name, count)
        assert the(objects, "Service", name)["spec"]["clusterIP"] == "None"


def test_containers_are_given_words_that_their_verbs_take() -> None:
    objects = made()
    for kind, name, verb in (("StatefulSet", "pd-prefill", "serve"), ("Deployment", "pd-router", "route")):
        (container,) = the(objects, kind, name)["spec"]["template"]["spec"]["containers"]
        args = build_parser([verb]).parse_args(container["args"])
        assert args.verb == verb
        if verb == "serve":
            assert args.listen == ("0.0.0.0", container["ports"][0]["containerPort"])
            assert (args.store, args.role, args.cache) == ("redis://cache:6379", "producer", 1 << 30)
    (big,) = the(objects, "StatefulSet", "pd-big")["spec"]["template"]["spec"]["containers"]
    assert big["command"][:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert big["resources"] == {"limits": {"nvidia.com/gpu": "1"}}


def test_only_the_router_reaches_engines() -> None:
    objects = made()
    policy = the(objects, "NetworkPolicy", "pd-engines")["spec"]
    engines = the(objects, "StatefulSet", "pd-decode")["spec"]["template"]["metadata"]["labels"]
    router = the(objects, "Deployment", "pd-router")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= engines.items()
    (rule,) = policy["ingress"]
    allowed = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert allowed <= router.items() and not allowed <= engines.items()


def test_the_text_is_yaml_of_the_same_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = made()
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects
    odd = {"a": ['x: "y"\n\n  z\n', [], {}, [[1, {"b": None}], True]], "c": {"d": "é # no comment", "e": "- 1"}}
    assert yaml.safe_load(as_yaml([odd])) == odd
    file = tmp_path / "c.toml"
    file.write_text('[[instances]]\n[kubernetes]\nengine_image = "e:1"\n', "utf-8")
    assert main(["cluster", "manifests", str(file)]) == 0
    assert [each["kind"] for each in yaml.safe_load_all(capsys.readouterr().out)][:2] == ["Service", "StatefulSet"]
    file.write_text("[[instances]]\n", "utf-8")
    assert main(["cluster", "manifests", str(file)]) == 2
    assert "engine_image is missing" in capsys.readouterr().err


@pytest.mark.parametrize("store", [{"serve": "memory://1GiB"}, {"constellation": []}, {"address": "unix:///run/s"}])
def test_a_store_of_one_computer_is_refused(store: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="several computers"):
        made(store=store)
