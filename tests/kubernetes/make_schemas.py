"""Makes `schemas.json`: what the manifests in examples/kubernetes/ are validated against.

    python3 -m venv /tmp/schemas
    /tmp/schemas/bin/pip install kubernetes-validate==1.34.1 kubeflow-training==1.9.4 kubeflow-trainer-api==2.3.0
    /tmp/schemas/bin/python tests/kubernetes/make_schemas.py

Those packages hold the published schemas of Kubernetes 1.34, of TFJob (Kubeflow's training operator 1.9), and of
JobSet v1alpha2, all under Apache-2.0. Left out are descriptions, what only Kubernetes itself writes (`status`), and
volumes of single vendors.
"""

import importlib.resources
import inspect
import json
import pathlib
import re

import kubernetes_validate
from kubeflow.training import models
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

_TARGET = pathlib.Path(__file__).with_name("schemas.json")
_DEFINITIONS = "kubernetes-json-schema/v1.34.0-local-strict/_definitions.json"
_KINDS = ("batch.v1.Job", "core.v1.Service", "core.v1.PersistentVolumeClaim", "apps.v1.StatefulSet")
_TF_JOB, _JOB_SET = "KubeflowOrgV1TFJob", "JobsetV1alpha2JobSet"
_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_KEPT_VOLUMES = {
    "name",
    "configMap",
    "csi",
    "emptyDir",
    "hostPath",
    "nfs",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SIMPLE = {"str": {"type": "string"}, "int": {"type": "integer"}, "bool": {"type": "boolean"}}


def main():
    definitions = json.loads(importlib.resources.files(kubernetes_validate).joinpath(_DEFINITIONS).read_text())["$defs"]
    volume = definitions["io.k8s.api.core.v1.Volume"]
    volume["properties"] = {name: value for name, value in volume["properties"].items() if name in _KEPT_VOLUMES}
    definitions = strip({**definitions, **tf_job(_TF_JOB, {}), **job_set()})
    kinds = [*(f"io.k8s.api.{kind}" for kind in _KINDS), _TF_JOB, _JOB_SET]
    for kind in kinds:
        del definitions[kind]["properties"]["status"]
    names = sorted(reachable(kinds, definitions))
    lines = [f"{json.dumps(name)}: {json.dumps(definitions[name], sort_keys=True)}" for name in names]
    comment = "Made by make_schemas.py, which names the sources. Apache-2.0, The Kubernetes and The Kubeflow Authors."
    _TARGET.write_text(f'{{"$comment": "{comment}", "$defs": {{\n' + ",\n".join(lines) + "\n}}\n")


def strip(schema):
    """Without what is only for readers, and what Kubernetes alone understands."""
    if isinstance(schema, list):
        return [strip(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value
        for name, value in schema.items()
        if not (name in ("description", "title", "default") and not isinstance(value, dict))
        and not name.startswith("x-kubernetes")
    }
    return {name: strip(value) for name, value in kept.items()}


def reachable(names, definitions):
    """These definitions and those that they refer to, directly or not."""
    found = set()
    while names:
        name = names.pop()
        if name in definitions and name not in found:
            found.add(name)
            names += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(definitions[name]))
    return found


def tf_job(name, found):
    """The definitions of a class of Kubeflow's client, and of those that it refers to."""
    kind = getattr(models, name)
    beginning = inspect.getsource(kind.__init__)
    found[name] = definition = {"type": "object", "additionalProperties": False}
    definition["properties"] = {kind.attribute_map[a]: of_type(t, found) for a, t in kind.openapi_types.items()}
    definition["required"] = [
        kind.attribute_map[a] for a in kind.openapi_types if f"if {a} is not None" not in beginning
    ]
    return found


def of_type(text, found):
    """The schema of a type as the client names it."""
    if inner := re.fullmatch(r"list\[(.+)\]", text):
        return {"type": "array", "items": of_type(inner[1], found)}
    if inner := re.fullmatch(r"dict\(str, (.+)\)", text):
        return {"type": "object", "additionalProperties": of_type(inner[1], found)}
    if text in _SIMPLE:
        return _SIMPLE[text]
    if text.startswith("KubeflowOrg"):
        if text not in found:
            tf_job(text, found)
        return {"$ref": f"#/$defs/{text}"}
    if text == "V1PodTemplateSpec":
        return {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
    if text == "V1ObjectMeta":
        return {"$ref": f"#/$defs/{_META}"}
    return {}


def job_set():
    """The definitions of a JobSet; those of Kubernetes in it are Kubernetes's own."""
    schema = JobsetV1alpha2JobSet.model_json_schema(by_alias=True)
    definitions = {_JOB_SET: schema, **schema.pop("$defs")}
    own = {name: {**value, "additionalProperties": False} for name, value in definitions.items() if "Jobset" in name}
    text = json.dumps(own).replace("IoK8sApimachineryPkgApisMetaV1ObjectMeta", _META)
    return json.loads(re.sub(r"IoK8sApi(Batch|Core)V1(\w+)", lambda m: f"io.k8s.api.{m[1].lower()}.v1.{m[2]}", text))


if __name__ == "__main__":
    main()
