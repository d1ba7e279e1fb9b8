"""Kubernetes manifests of a described cluster. Pure.

Instances are StatefulSets: the router addresses each by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skymemory.errors import InvalidInput
from skymemory_lab.cluster.description import ClusterDescription, Instances
from skymemory_lab.cluster.services import engine_words, router_settings, vllm_words

ENGINE_PORT, ROUTER_PORT = 8000, 8080
_SETTINGS = "/etc/skymemory"
_FILE = "router.toml"
_PART_OF = "app.kubernetes.io/part-of"
_NAME = "app.kubernetes.io/name"
_COMPONENT = "app.kubernetes.io/component"
_START_PROBES = 120
_ENGINE_GRACE_S, _ROUTER_GRACE_S = 60, 45

Manifest = dict[str, Any]


def manifests(description: ClusterDescription) -> list[Manifest]:
    """Return all objects in order of dependency."""
    store = _store(description)
    objects: list[Manifest] = []
    for group in description.instances:
        objects += _instances(description, group, store)
    objects.append(_policy(description))
    return objects + (_router(description) if description.router is not None else [])


def _store(description: ClusterDescription) -> str:
    if description.store is None:
        return ""
    address = description.store.address
    if address.partition(":")[0] not in ("redis", "rediss"):
        raise InvalidInput(
            "store: on Kubernetes instances run on several computers: expected address = 'redis://HOST:PORT' of a "
            "Redis, a Valkey or a store daemon that all reach"
        )
    return address


def _labels(description: ClusterDescription, name: str, component: str) -> dict[str, str]:
    return {_NAME: f"{description.name}-{name}", _COMPONENT: component, _PART_OF: description.name}


def _object(api: str, kind: str, name: str, labels: dict[str, str], **more: Any) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": labels}, **more}


def _instances(description: ClusterDescription, group: Instances, store: str) -> list[Manifest]:
    name, labels = f"{description.name}-{group.name}", _labels(description, group.name, "engine")
    container = _engine_container(description, group, store)
    service = {
        "clusterIP": "None",
        "selector": {_NAME: name},
        "ports": [{"name": "http", "port": ENGINE_PORT, "targetPort": "http"}],
    }
    pods = {
        "serviceName": name,
        "replicas": group.count,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {_NAME: name}},
        "template": {"metadata": {"labels": labels}, "spec": _pod(container, _ENGINE_GRACE_S)},
    }
    return [
        _object("v1", "Service", name, labels, spec=service),
        _object("apps/v1", "StatefulSet", name, labels, spec=pods),
    ]


def _engine_container(description: ClusterDescription, group: Instances, store: str) -> dict[str, Any]:
    settings = description.kubernetes
    is_ours = group.engine == "skymemory"
    key, image = ("engine_image", settings.engine_image) if is_ours else ("vllm_image", settings.vllm_image)
    if not image:
        raise InvalidInput(f"kubernetes: {key} is missing: {group.name} needs it")
    container: dict[str, Any] = {"name": "engine", "image": image}
    if is_ours:
        container["args"] = list(engine_words(group, "0.0.0.0", ENGINE_PORT, store))
    else:
        container["command"] = ["python3", *vllm_words(group, "0.0.0.0", ENGINE_PORT, store)[1:]]
        if settings.gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": str(settings.gpus)}}
    if group.environment:
        container["env"] = [{"name": name, "value": value} for name, value in group.environment.items()]
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5}
    container["ports"] = [{"name": "http", "containerPort": ENGINE_PORT}]
    container["readinessProbe"] = probe
    container["startupProbe"] = {**probe, "failureThreshold": _START_PROBES}
    return container


def _router(description: ClusterDescription) -> list[Manifest]:
    name, labels = f"{description.name}-router", _labels(description, "router", "router")
    backends = []
    for group in description.instances:
        service = f"{description.name}-{group.name}"
        for number in range(group.count):
            backends.append(
                (f"{group.name}-{number}", f"http://{service}-{number}.{service}:{ENGINE_PORT}", group.role)
            )
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5}
    container = {
        "name": "router",
        "image": description.kubernetes.image,
        "args": ["route", "--settings", f"{_SETTINGS}/{_FILE}", "--listen", f"0.0.0.0:{ROUTER_PORT}"],
        "ports": [{"name": "http", "containerPort": ROUTER_PORT}],
        "readinessProbe": {**probe, "httpGet": {"path": "/ready", "port": "http"}},
        "livenessProbe": {**probe, "failureThreshold": 6},
        "volumeMounts": [{"name": "settings", "mountPath": _SETTINGS, "readOnly": True}],
    }
    pod = {
        **_pod(container, _ROUTER_GRACE_S),
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "settings", "configMap": {"name": name}}],
    }
    deployment = {
        "replicas": 1,  # each router learns only from the requests that it sent
        "selector": {"matchLabels": {_NAME: name}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    service_spec = {
        "selector": {_NAME: name},
        "ports": [{"name": "http", "port": ROUTER_PORT, "targetPort": "http"}],
    }
    settings = {_FILE: router_settings(description, backends)}
    return [
        _object("v1", "ConfigMap", name, labels, data=settings),
        _object("v1", "Service", name, labels, spec=service_spec),
        _object("apps/v1", "Deployment", name, labels, spec=deployment),
    ]


def _pod(container: dict[str, Any], grace_s: int) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
    }


def _policy(description: ClusterDescription) -> Manifest:
    # Return a policy by which only the router, or else the cluster's pods, reach the engines.
    engines = {_COMPONENT: "engine", _PART_OF: description.name}
    clients = {_PART_OF: description.name}
    if description.router is not None:
        clients[_COMPONENT] = "router"
    spec = {
        "podSelector": {"matchLabels": engines},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": clients}}],
                "ports": [{"protocol": "TCP", "port": "http"}],
            }
        ],
    }
    labels = {_PART_OF: description.name}
    return _object("networking.k8s.io/v1", "NetworkPolicy", f"{description.name}-engines", labels, spec=spec)


def as_yaml(objects: Sequence[Manifest]) -> str:
    return "".join(f"---\n{_block(manifest, '')}" for manifest in objects)


def _block(value: Any, indent: str) -> str:
    """Return a table or list in block style."""
    lines = []
    for key, child in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        head = f"{indent}{key}:" if key is not None else f"{indent}-"
        if isinstance(child, dict | list) and child:
            inner = _block(child, indent + "  ")
            # A list's item begins on the line of its dash.
            lines.append(f"{head} {inner[len(indent) + 2 :]}" if key is None else f"{head}\n{inner}")
        elif isinstance(child, str) and child.endswith("\n") and not child.startswith((" ", "\n")):
            text = "".join(f"{indent}  {line}\n" if line else "\n" for line in child.splitlines())
            lines.append(f"{head} |\n{text}")
        else:
            lines.append(f"{head} {json.dumps(child, ensure_ascii=False)}\n")
    return "".join(lines)
