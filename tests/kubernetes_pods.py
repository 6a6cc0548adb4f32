"""Reads manifests as Kubernetes does, as far as pods are concerned: their names, and their programs' environment."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import yaml

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "kubernetes"
NAMESPACE = "default"
_LABEL = re.compile(r"metadata\.labels\['(.+)'\]")


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod.

    Attributes:
      hostname: Host name of the pod.
      domain: The rest of the name by which others find the pod, within its namespace.
      labels: Labels of the pod, also those that Kubernetes sets.
      container: The pod's container.
      variables: Variables that Kubernetes, or an operator, adds to the container's.
      spec: The whole specification of the pod.
    """

    hostname: str
    domain: str
    labels: dict
    container: dict
    variables: dict
    spec: dict

    @property
    def port(self):
        return self.container["ports"][0]["containerPort"]

    def environment(self, secrets):
        """Returns the variables of the pod's program; `secrets` are the values of Secrets, by name and key."""
        found = {"HOSTNAME": self.hostname}
        for entry in self.container.get("env", ()):
            if "value" in entry:
                # A value can only use variables that stand before it.
                found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found.get(m[1], m[0]), entry["value"])
            elif "fieldRef" in entry["valueFrom"]:
                found[entry["name"]] = self.labels[_LABEL.fullmatch(entry["valueFrom"]["fieldRef"]["fieldPath"])[1]]
            else:
                reference = entry["valueFrom"]["secretKeyRef"]
                found[entry["name"]] = secrets[reference["name"]][reference["key"]]
        return found | self.variables


def read(name):
    """Returns the objects of a manifest."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def find(objects, kind):
    """Those of a kind."""
    return [each for each in objects if each["kind"] == kind]


def pods_of(objects):
    """The pods that controllers make of these objects."""
    made = []
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec")
        if each["kind"] == "Job":
            made += _pods_of_job(name, spec, {})
        elif each["kind"] == "StatefulSet":
            for index in range(spec["replicas"]):
                labels = {**spec["template"]["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)}
                made.append(_pod(f"{name}-{index}", spec["serviceName"], labels, spec["template"]["spec"], {}))
        elif each["kind"] == "JobSet":
            labels = {"jobset.sigs.k8s.io/jobset-name": name}
            for job in spec["replicatedJobs"]:
                for index in range(job["replicas"]):
                    made += _pods_of_job(
                        f"{name}-{job['name']}-{index}", job["template"]["spec"], labels, spec["network"]["subdomain"]
                    )
        elif each["kind"] == "TFJob":
            made += _pods_of_tf_job(name, spec)
    return made


def _pods_of_job(name, spec, labels, subdomain=None):
    assert spec["completionMode"] == "Indexed"
    pods = []
    for index in range(spec["parallelism"]):
        own = {"batch.kubernetes.io/job-name": name, "batch.kubernetes.io/job-completion-index": str(index)}
        domain = subdomain or spec["template"]["spec"]["subdomain"]
        variables = {"JOB_COMPLETION_INDEX": str(index)}  # Set behind all others, which cannot refer to it.
        pods.append(_pod(f"{name}-{index}", domain, {**labels, **own}, spec["template"]["spec"], variables))
    return pods


def _pods_of_tf_job(name, spec):
    """The operator makes a headless Service for each pod, and TF_CONFIG with their names."""
    cluster, tasks = {}, []
    for kind, replicas in spec["tfReplicaSpecs"].items():
        container = replicas["template"]["spec"]["containers"][0]
        assert container["name"] == "tensorflow"
        (port,) = (each["containerPort"] for each in container["ports"] if each["name"] == "tfjob-port")
        for index in range(replicas["replicas"]):
            host = f"{name}-{kind.lower()}-{index}"
            cluster.setdefault(kind.lower(), []).append(f"{host}.{NAMESPACE}.svc:{port}")
            tasks.append((host, kind.lower(), index, replicas["template"]["spec"]))
    pods = []
    for host, kind, index, template in tasks:
        config = {"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"}
        labels = {"training.kubeflow.org/job-name": name}
        pods.append(_pod(host, f"{NAMESPACE}.svc", labels, template, {"TF_CONFIG": json.dumps(config)}))
    return pods


def _pod(hostname, domain, labels, spec, variables):
    (container,) = spec["containers"]
    return Pod(hostname, domain, labels, container, variables, spec)
