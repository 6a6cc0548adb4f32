"""The manifests in examples/kubernetes/: they are valid, and the processes in their pods find each other."""

from __future__ import annotations

import copy
import json
import os
import pathlib
from unittest import mock

import jsonschema
import yaml
from absl.testing import absltest, parameterized

import kubernetes_pods as pods
from hop_tf.cluster import Cluster
from hop_tf.tools.launchers import environment

_ROOT = pathlib.Path(__file__).parents[2]
_SCHEMAS = json.loads(pathlib.Path(__file__).with_name("schemas.json").read_text())
_KINDS = {
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("batch/v1", "Job"): "io.k8s.api.batch.v1.Job",
    ("apps/v1", "StatefulSet"): "io.k8s.api.apps.v1.StatefulSet",
    ("kubeflow.org/v1", "TFJob"): "KubeflowOrgV1TFJob",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
}
_SECRETS = {"train-token": {"token": "a secret"}}
_MANIFESTS = sorted(path.name for path in pods.FOLDER.glob("*.yaml"))


def _problems(manifest):
    schema = {"$ref": f"#/$defs/{_KINDS[manifest['apiVersion'], manifest['kind']]}", "$defs": _SCHEMAS["$defs"]}
    return [*_messages(jsonschema.Draft202012Validator(schema).iter_errors(manifest))]


def _messages(errors):
    """Yields a line for each error and its place, down to the parts that fit none of several schemas."""
    for error in errors:
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        yield from _messages(error.context)


class SchemasTest(parameterized.TestCase):
    def test_finds_the_manifests(self):
        self.assertContainsSubset({"indexed_job.yaml", "jobset.yaml", "shat.yaml", "tfjob.yaml"}, _MANIFESTS)

    @parameterized.parameters(*_MANIFESTS)
    def test_valid(self, name):
        for manifest in pods.read(name):
            self.assertEqual(_problems(manifest), [])

    @parameterized.parameters(
        ("indexed_job.yaml", "Job", ("spec", "completion"), 4, "'completion' was unexpected"),
        ("indexed_job.yaml", "Job", ("spec", "completions"), "four", "'four' is not of type 'integer'"),
        ("indexed_job.yaml", "Service", ("spec", "clusterIp"), "None", "'clusterIp' was unexpected"),
        ("indexed_job.yaml", "PersistentVolumeClaim", ("spec", "accessModes"), "x", "'x' is not of type 'array'"),
        ("shat.yaml", "StatefulSet", ("spec", "template", "spec", "container"), [], "'container' was unexpected"),
        ("tfjob.yaml", "TFJob", ("spec", "tfReplicaSpecs", "Worker", "replicas"), "4", "'4' is not of type 'integer'"),
        ("tfjob.yaml", "TFJob", ("spec", "tfReplicaSpec"), {}, "'tfReplicaSpec' was unexpected"),
        ("jobset.yaml", "JobSet", ("spec", "network", "enableDnsHostnames"), True, "'enableDnsHostnames' was unexp"),
    )
    def test_finds_mistakes(self, name, kind, path, value, message):
        (manifest,) = pods.find(pods.read(name), kind)
        changed = place = copy.deepcopy(manifest)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        self.assertRegex("\n".join(_problems(changed)), message)


class ClusterTest(parameterized.TestCase):
    """Tests that the pods of each manifest read their own addresses from the environment."""

    def clusters(self, name):
        """The pods of a manifest, each with the cluster that its program reads."""
        made = pods.pods_of(pods.read(name))
        read = []
        for pod in made:
            with (
                mock.patch.dict(os.environ, pod.environment(_SECRETS), clear=True),
                mock.patch.object(environment, "check_own_name") as check,
            ):
                cluster = Cluster.from_resolver(environment.cluster_from_environment())
            check.assert_called_once()
            read.append((pod, cluster))
        return read

    @parameterized.parameters(*_MANIFESTS)
    def test_addresses_are_those_of_the_pods(self, name):
        read = self.clusters(name)
        self.assertGreater(len(read), 1)
        names = set()
        for pod, cluster in read:
            self.assertEqual(cluster.all_addresses, read[0][1].all_addresses)
            host, port = cluster.all_addresses[cluster.number].split(":")
            self.assertEqual(int(port), pod.port)
            within = f".{pods.NAMESPACE}.svc"
            self.assertEqual(host.removesuffix(within), f"{pod.hostname}.{pod.domain}".removesuffix(within))
            names.add(cluster.number)
        self.assertEqual(names, set(range(len(read[0][1].all_addresses))))

    @parameterized.parameters(*_MANIFESTS)
    def test_liveness_probes_ask_the_pod_itself(self, name):
        for pod, cluster in self.clusters(name):
            if cluster.task_type == "ps":  # A server that hangs is noticed by the workers.
                continue
            command = pod.container["livenessProbe"]["exec"]["command"][-1].replace("$HOSTNAME", pod.hostname)
            self.assertEndsWith(command, f' "{cluster.all_addresses[cluster.number]}"')

    @parameterized.parameters("indexed_job.yaml", "shat.yaml")
    def test_services_lead_to_the_pods(self, name):
        objects = pods.read(name)
        services = {service["metadata"]["name"]: service["spec"] for service in pods.find(objects, "Service")}
        for pod in pods.pods_of(objects):
            service = services[pod.domain]
            self.assertEqual((service["clusterIP"], service["publishNotReadyAddresses"]), ("None", True))
            self.assertContainsSubset(service["selector"].items(), pod.labels.items())
            self.assertEqual([port["port"] for port in service["ports"]], [pod.port])

    @parameterized.parameters(*_MANIFESTS)
    def test_volumes_are_there(self, name):
        objects = pods.read(name)
        claims = {claim["metadata"]["name"] for claim in pods.find(objects, "PersistentVolumeClaim")}
        templates = {
            claim["metadata"]["name"]
            for each in pods.find(objects, "StatefulSet")
            for claim in each["spec"]["volumeClaimTemplates"]
        }
        for pod in pods.pods_of(objects):
            volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
            mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
            self.assertContainsSubset(mounted, volumes.keys() | templates)
            asked = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
            self.assertContainsSubset(asked, claims)

    def test_the_pods_of_shat(self):
        read = self.clusters("shat.yaml")
        self.assertEqual([cluster.task_type for _, cluster in read], ["ps"] * 2 + ["worker"] * 4)


class ImageTest(parameterized.TestCase):
    """To build an image takes minutes and a registry, so no test does it."""

    def test_copies_what_is_there(self):
        text = (_ROOT / "Dockerfile").read_text()
        lines = [line.split() for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
        copied = {path for words in lines for path in words[1:-1]}
        self.assertContainsSubset({"hop_tf", "ops", "strategies", "examples"}, copied)
        for path in copied:
            self.assertTrue((_ROOT / path).exists(), path)

    @parameterized.parameters(*_MANIFESTS)
    def test_the_docs_build_the_images(self, name):
        page = (_ROOT / "docs" / "kubernetes.md").read_text()
        for pod in pods.pods_of(pods.read(name)):
            self.assertIn(f"docker build -t {pod.container['image']} ", page)
            self.assertEqual(pod.spec["securityContext"]["runAsUser"], 1000)

    def test_yaml_in_the_docs_is_valid(self):
        page = (_ROOT / "docs" / "kubernetes.md").read_text()
        blocks = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
        self.assertNotEmpty(blocks)
        for block in blocks:
            yaml.safe_load(block)


if __name__ == "__main__":
    absltest.main()
