"""The manifests: valid by the schemas of Kubernetes, put together by kustomize, and complete: what
one names, another one makes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.programs import printed

DOCKER = Path(__file__).parents[2] / "docker"
FILES = [*sorted((DOCKER / "kubernetes").rglob("*.yaml")), *(DOCKER / "monitoring").glob("k*.yaml")]
NO_SCHEMA = ("kustomize.config.k8s.io", "keda.sh")
SECRETS = {"server": {"url", "password"}, "metrics": {"token"}}
"""What docker/README.md tells people to create."""


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The example overlay, as `kubectl apply -k` would send it."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    docker = shutil.copytree(DOCKER, tmp_path_factory.mktemp("overlay") / "docker")
    shutil.copy(DOCKER.parent / "configs/demo.toml", docker / "kubernetes/my_run/run.toml")
    return build(docker)


def build(docker: Path) -> list[dict[str, Any]]:
    return documents(printed("kubectl", "kustomize", docker / "kubernetes/my_run"))


def templates(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in found:
        if "template" in document.get("spec", {}):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_are_valid(path: Path) -> None:
    for document in documents(path.read_text(encoding="utf-8")):
        if not document["apiVersion"].startswith(NO_SCHEMA):
            kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_overlay_is_valid_and_complete(rendered: list[dict[str, Any]]) -> None:
    made: dict[str, set[str]] = {}
    for document in rendered:
        made.setdefault(document["kind"], set()).add(document["metadata"]["name"])
        assert document["metadata"]["namespace"] == "rolloutmq"
        if not document["apiVersion"].startswith(NO_SCHEMA):
            kubernetes_validate.validate(document, "1.31", strict=True)
    assert made["Job"] == {"trainer", "producer"}
    assert "worker" in made["Deployment"]
    for name, pod in templates(rendered):
        assert list(unknown(pod, made)) == [], name
        for container in pod["containers"]:
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert container["image"].startswith(("registry.example/", "valkey/", "prom/"))
            assert "livenessProbe" in container or name == "server"


def test_a_trainer_of_several_ranks_is_an_indexed_job_whose_pods_have_names(
    rendered: list[dict[str, Any]], tmp_path: Path
) -> None:
    docker = shutil.copytree(DOCKER, tmp_path / "docker")
    overlay = docker / "kubernetes/my_run/kustomization.yaml"
    text = overlay.read_text(encoding="utf-8")
    overlay.write_text(text.replace("# - ../trainer_ranks", "- ../trainer_ranks"), encoding="utf-8")
    shutil.copy(DOCKER.parent / "configs/demo.toml", docker / "kubernetes/my_run/run.toml")
    several = build(docker)
    kinds = {(d["kind"], d["metadata"]["name"]): d for d in several}
    added = set(kinds) - {(d["kind"], d["metadata"]["name"]) for d in rendered}
    assert added == {("Service", "trainer")}
    job = kinds["Job", "trainer"]
    for document in (job, kinds["Service", "trainer"]):
        kubernetes_validate.validate(document, "1.31", strict=True)
    pod = job["spec"]["template"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] > 1
    assert pod["spec"]["subdomain"] == "trainer"
    assert (
        kinds["Service", "trainer"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    )


def unknown(pod: dict[str, Any], made: dict[str, set[str]]) -> Iterator[str]:
    for volume in pod.get("volumes", []):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        configs = volume.get("configMap", {}).get("name")
        secret = volume.get("secret", {}).get("secretName")
        if claim not in {None, *made["PersistentVolumeClaim"]}:
            yield claim
        if configs not in {None, *made["ConfigMap"]}:
            yield configs
        if secret not in {None, *SECRETS}:
            yield secret
    for entry in (entry for one in pod["containers"] for entry in one.get("env", [])):
        read = entry.get("valueFrom", {}).get("secretKeyRef")
        if read and read["key"] not in SECRETS[read["name"]]:
            yield read["key"]


def test_a_finished_run_keeps_no_gpu(rendered: list[dict[str, Any]]) -> None:
    """Jobs end, and the only Deployment with GPUs is scaled to nothing."""
    (scaler,) = [document for document in rendered if document["kind"] == "ScaledObject"]
    scaled = scaler["spec"]["scaleTargetRef"]["name"]
    kinds = {
        document["metadata"]["name"]: document["kind"]
        for document in rendered
        if document is not scaler
    }
    assert (kinds[scaled], scaler["spec"]["minReplicaCount"]) == ("Deployment", 0)
    for name, pod in templates(rendered):
        has_gpu = "nvidia.com/gpu" in str(pod)
        assert has_gpu == (name in ("trainer", "worker")), name
        if has_gpu and name != scaled:
            assert (kinds[name], pod["restartPolicy"]) == ("Job", "Never")
    address = scaler["spec"]["triggers"][0]["metadata"]["serverAddress"]
    host = re.fullmatch(r"http://(\w+):9090", address)
    assert host is not None
    assert host[1] in kinds
