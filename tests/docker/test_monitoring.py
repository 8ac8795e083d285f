"""Dashboard, alerts and manifests as files: valid by their schemas, and every metric and flag in
them exists.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from buffer.control.events import REPORTED
from buffer.redis.server.check import check_server
from buffer.redis.server.embedded import valkey_binary
from rolloutmq.command_list import all_commands
from rolloutmq.views.prometheus import RunCollector
from tests.cluster import Node, free_ports
from tests.programs import printed, python
from tests.rolloutmq.populate import Scene
from tests.servers import KINDS, find_redis, raw_client

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARD = json.loads((DOCKER / "monitoring/grafana/rolloutmq.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DOCKER / "monitoring/alerts.yaml").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
MANIFESTS = [
    (path.name, document)
    for path in [
        *sorted((DOCKER / "kubernetes").rglob("*.yaml")),
        DOCKER / "monitoring/kubernetes.yaml",
    ]
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"].replace("$run", "demo") for target in panel["targets"])
    for group in ALERTS["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for _, document in MANIFESTS:
        for trigger in (
            document.get("spec", {}).get("triggers", [])
            if document["kind"] == "ScaledObject"
            else []
        ):
            if query := trigger["metadata"].get("query"):
                yield query


def commands() -> Iterator[list[str]]:
    """Every command line that a container or a Slurm script gives to `rolloutmq`."""
    for service in COMPOSE["services"].values():
        if "rolloutmq" in service.get("image", ""):
            yield [
                word.replace("${CONFIG:-configs/demo.toml}", "configs/demo.toml")
                for word in service["command"]
            ]
    for _, document in MANIFESTS:
        template = (
            document.get("spec", {}).get("template", {})
            if isinstance(document.get("spec"), dict)
            else {}
        )
        for container in template.get("spec", {}).get("containers", []):
            if "rolloutmq" in container["image"]:
                yield container["args"]
    for script in sorted((DOCKER / "slurm").glob("*.sh")):
        for line in script.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            if found := re.search(
                r"\brolloutmq ((?:worker|train|producer|judge|warm-start|metrics)\b.*)", line
            ):
                yield shlex.split(found[1].split(" &")[0].replace("$CONFIG", "configs/demo.toml"))


def test_every_metric_in_dashboard_alerts_and_scaler_exists_with_those_labels(scene: Scene) -> None:
    scene.run.control.report(scene.trainer, 1, dict.fromkeys(REPORTED, 0.5))
    scene.run.control.report(scene.trainer, 1, {"eval/score": 0.5}, task="exam")
    labels = {
        sample.name: set(sample.labels)
        for family in RunCollector(scene.run.store).collect()
        for sample in family.samples
    }
    used = {}
    for expression in expressions():
        promql_parser.parse(expression)
        for name, selectors in re.findall(r"\b(rolloutmq_\w+)(\{[^}]*\})?", expression):
            used[name] = set(re.findall(r"(\w+)\s*[=!]~?", selectors))
    assert len(used) > 20
    assert {
        name: wanted
        for name, wanted in used.items()
        if not wanted <= labels.get(name, set()) | {"none"}
    } == {}
    assert used.keys() <= labels.keys()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    cases = DOCKER / "monitoring" / "alerts_test.yaml"
    printed("promtool", "test", "rules", cases)


@pytest.mark.parametrize("words", [*commands()], ids=" ".join)
def test_every_command_line_is_one(words: list[str]) -> None:
    """Flags and arguments are those that the command declares."""
    known = all_commands()
    command = known[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        assert not context.args


def test_compose_files_are_valid() -> None:
    files = [str(DOCKER / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    python("-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files)


@pytest.mark.parametrize("kind", KINDS)
def test_the_settings_of_the_server_lose_nothing(kind: str, tmp_path: Path) -> None:
    """Both servers start with the file as it is, and `doctor` has nothing to say against it."""
    binary = str(valkey_binary()) if kind == "valkey" else find_redis()
    node = Node(binary, tmp_path, free_ports(1)[0], ("--include", str(DOCKER / "redis.conf")))
    try:
        node.start()
        with raw_client(node.url) as client:
            assert [str(finding) for finding in check_server(client) if finding.level != "ok"] == []
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    finally:
        node.kill()
