"""The manifests of ``deploy/kubernetes``, and the published schemas where they are beside the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
SCHEMAS = ROOT.parent / "shared/data/crds"

Manifest = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The schemas are long; libyaml reads them in a tenth of the time."""


def manifests() -> list[Manifest]:
    """All documents of all files but the kustomization."""
    files = sorted(file for file in FOLDER.glob("*.yaml") if file.name != "kustomization.yaml")
    return [each for file in files for each in yaml.safe_load_all(file.read_text("utf-8")) if each]


def the(kind: str, name: str | None = None) -> Manifest:
    """The one of that kind (and name)."""
    (found,) = [
        each for each in manifests() if each["kind"] == kind and (name is None or each["metadata"]["name"] == name)
    ]
    return found


def published_schema(manifest: Manifest) -> dict[str, Any] | None:
    """The schema of a custom resource as its definition has it, closed against fields it does not know."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    for file in SCHEMAS.glob(f"{group}_*.yaml"):
        definition = yaml.load(file.read_text("utf-8"), Loader=LOADER)
        if definition["spec"]["names"]["kind"] == manifest["kind"]:
            for each in definition["spec"]["versions"]:
                if each["name"] == version and each["served"]:
                    return closed(each["schema"]["openAPIV3Schema"])
    return None


def closed(schema: Any) -> Any:
    """A server drops fields that a schema does not know without a word; here they are errors."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    tight = {key: closed(value) for key, value in schema.items()}
    properties = schema.get("properties")
    if (
        isinstance(properties, dict)
        and schema.get("type") == "object"
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        tight.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        tight.pop("type", None)
    return tight
