from __future__ import annotations

import http.client
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from buffer.control.worker_record import (
    NUMBERS,
    PAUSE_BOUNDS_S,
    HeartbeatReport,
    Histogram,
    WorkerState,
)
from buffer.errors import ConfigError, Fenced
from buffer.failure_text import join_text, trace_text
from buffer.ids import new_nonce
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.http_endpoint import MetricsEndpoint
from rolloutmq.views.prometheus import RunCollector, serve_process
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import WEIGHTS, Scene
from tests.waits import DEADLINE_S, until


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, values of labels but run…) -> number"""
    return {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name != "run"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def fetch(url: str, token: str = "") -> str:
    request = urllib.request.Request(
        url, headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    with urllib.request.urlopen(request, timeout=400) as answer:
        text: str = answer.read().decode()
        return text


@pytest.fixture
def endpoint(scene: Scene) -> Iterator[MetricsEndpoint]:
    collector = RunCollector(scene.run.store)
    served = MetricsEndpoint(
        collector.registry(), {"/workers_wanted": collector.read_workers_wanted}
    )
    yield served
    served.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[", "10.0.0.1"]
)
def test_a_page_elsewhere_whose_name_means_this_machine_reads_nothing(
    endpoint: MetricsEndpoint, host: str
) -> None:
    request = urllib.request.Request(f"{endpoint.url}/metrics", headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(request, timeout=400)
    refused.value.close()
    for own in ("localhost:1", "127.0.0.1", "[::1]:9"):
        fetch_as = urllib.request.Request(f"{endpoint.url}/metrics", headers={"Host": own})
        with urllib.request.urlopen(fetch_as, timeout=400) as answer:
            assert answer.status == 200


def test_metrics_say_what_status_says(scene: Scene, endpoint: MetricsEndpoint) -> None:
    found = samples(fetch(f"{endpoint.url}/metrics"))
    task = next(t for t in scene.run.account.totals().tasks if t.task == "math")
    for place, groups in task.stages.items():
        assert found["rolloutmq_groups", place, "math"] == groups
    assert found["rolloutmq_groups_enqueued_total", "math"] == task.enqueued == 12
    assert found["rolloutmq_train_steps_total", "taken"] == 2
    states = ("starting", "idle", "working", "paused", "draining", "silent")
    assert [found["rolloutmq_workers", state] for state in states] == [0, 2, 0, 0, 0, 0]
    assert found["rolloutmq_mode", "run"] == 1
    assert found["rolloutmq_mode", "abort"] == 0
    assert found["rolloutmq_payload_bytes",] > 0
    assert found["rolloutmq_account_faults",] == 0
    assert found["rolloutmq_up",] == 1


def test_every_number_of_a_heartbeat_is_shown_by_its_row(
    scene: Scene, endpoint: MetricsEndpoint, command: Command
) -> None:
    numbers = {name: n for n, name in enumerate(NUMBERS, start=21)}
    pulse = HeartbeatReport(1, WEIGHTS, WorkerState.IDLE, **numbers)  # type: ignore[arg-type]
    scene.run.fleet.heartbeat("w1", scene.workers["w1"], pulse, [])
    found = samples(fetch(f"{endpoint.url}/metrics"))
    (shown,) = [row for row in json_of(command("workers", "--json")) if row["id"] == "w1"]
    printed = command("workers").stdout
    for name, row in NUMBERS.items():
        assert shown[name] == numbers[name]
        metric = f"rolloutmq_{row.metric}" + ("_total" if row.is_counter else "")
        assert not row.metric or found[metric, "w1"] == numbers[name]
        assert not (row.table or row.note) or str(numbers[name]) in printed


def test_times_of_judges_and_pauses_are_histograms(scene: Scene, endpoint: MetricsEndpoint) -> None:
    pauses = Histogram(PAUSE_BOUNDS_S)
    pauses.add(0.02)
    scene.run.control.renew_role("trainer", scene.trainer, pauses=pauses)
    found = samples(fetch(f"{endpoint.url}/metrics"))
    judge = [
        found["rolloutmq_judge_seconds_bucket", bound, "w0"] for bound in ("0.1", "0.25", "+Inf")
    ]
    assert judge == [10, 39, 40]
    assert found["rolloutmq_judge_seconds_sum", "w0"] == 8.0
    assert found["rolloutmq_judge_seconds_count", "w0"] == 40
    bounds = ("0.01", "0.025", "+Inf")
    assert [found["rolloutmq_pause_seconds_bucket", bound] for bound in bounds] == [0, 1, 1]
    assert found["rolloutmq_pause_seconds_sum",] == 0.02


def test_the_last_step_is_what_the_newest_trainer_reported(
    scene: Scene, endpoint: MetricsEndpoint
) -> None:
    """Through a NaN, names that nobody reads, a lost role and an entry that is no JSON."""
    report = scene.run.control.report
    assert ("rolloutmq_step",) not in samples(fetch(f"{endpoint.url}/metrics"))
    metrics = {"rewards/mean": 0.25, "policy/kl_ref": 0.5, "time/step_s": 2.0, "time/wait_s": 0.5,
               "response_len/tokens": 900.0, "loss/policy": math.nan, "debug/x" * 9999: 1.0}  # fmt: skip
    report(scene.trainer, 7, metrics)
    report(scene.trainer, 6, {"eval/accuracy": 0.75, "eval/pass@8": 1.0}, task="exam")
    found = samples(fetch(f"{endpoint.url}/metrics"))
    assert found["rolloutmq_step",] == 7
    assert found["rolloutmq_step_reward_mean", "math"] == 0.25
    assert found["rolloutmq_step_kl", "reference"] == 0.5
    assert math.isnan(found["rolloutmq_step_loss",])
    assert [found["rolloutmq_step_seconds", part] for part in ("total", "wait")] == [2.0, 0.5]
    assert found["rolloutmq_step_tokens_per_second",] == 450
    assert found["rolloutmq_evaluation", "accuracy", "exam"] == 0.75
    assert found["rolloutmq_evaluation_step", "exam"] == 6
    stale, scene.trainer = scene.trainer, new_nonce()
    scene.run.trainers.open(scene.trainer, step=2, lineage="l2", take_over=True)
    with pytest.raises(Fenced):
        report(stale, 8, {"rewards/mean": 1.0})
    report(scene.trainer, 3, {"rewards/mean": 0.5, "rewards/mean/math": 0.125})
    found = samples(fetch(f"{endpoint.url}/metrics"))
    assert (found["rolloutmq_step",], found["rolloutmq_step_reward_mean", "math"]) == (3, 0.125)
    assert ("rolloutmq_step_kl", "reference") not in found
    scene.run.store.client.hset(scene.run.keys.report, "train", "[]")
    assert ("rolloutmq_step",) not in samples(fetch(f"{endpoint.url}/metrics"))


def test_failures_are_counted_by_eight_causes_and_other_ones_together(
    scene: Scene, endpoint: MetricsEndpoint
) -> None:
    scene.enqueue(12)
    jobs = scene.claim("w1", 16)
    for number, job in enumerate(jobs[:10]):
        trace = trace_text([f'  File "/home/me/judge.py", line {number}, in score'])
        text = join_text(f"judge 'mine' raised KeyError: {number}", trace)
        scene.run.jobs.release("w1", job, "failed", text)
    scene.run.jobs.release("w1", jobs[10], "failed", "\x1b[31m")
    counts = {
        labels[1]: number
        for labels, number in samples(fetch(f"{endpoint.url}/metrics")).items()
        if labels[0] == "rolloutmq_failures_total"
    }
    kept = {f"KeyError at judge.py:{n}": 1 for n in range(7)}
    assert counts == {"ValueError: the judge said no": 1, **kept, "other": 4}


def test_a_server_that_is_away_is_told_and_comes_back(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        Scene(Store(server.url, deadline_s=10), "demo").run.store.close()
        store = Store(server.url, deadline_s=0.2)
        endpoint = MetricsEndpoint(RunCollector(store).registry())
        server.kill()
        assert samples(fetch(f"{endpoint.url}/metrics")) == {("rolloutmq_up",): 0.0}
        server.start()
        assert samples(fetch(f"{endpoint.url}/metrics"))["rolloutmq_up",] == 1
        endpoint.close()
        store.close()


def test_others_than_loopback_want_a_token(scene: Scene) -> None:
    with pytest.raises(ConfigError, match=r"metrics on 0\.0\.0\.0"):
        MetricsEndpoint(RunCollector(scene.run.store).registry(), host="0.0.0.0")
    served = MetricsEndpoint(RunCollector(scene.run.store).registry(), token="s3cret")
    for given in ("", "wrong", "s3cre"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(f"{served.url}/metrics", given)
    assert "rolloutmq_up" in fetch(f"{served.url}/metrics", "s3cret")
    assert fetch(f"{served.url}/healthz") == "ok\n"
    served.close()


def test_a_header_that_the_exporter_cannot_parse_is_refused(scene: Scene) -> None:
    served = MetricsEndpoint(RunCollector(scene.run.store).registry())
    for kind in ("application/openmetrics-text", "text/plain"):
        for version, status in (("1.0.0", 200), ("", 200), ("x", 400), ("1.x", 400)):
            connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=400)
            connection.request("GET", "/metrics", headers={"Accept": f"{kind};version={version}"})
            assert (connection.getresponse().status, version) == (status, version)
            connection.close()
    served.close()


def test_the_command_prints_what_the_endpoint_would(scene: Scene, command: Command) -> None:
    done = command("metrics")
    assert done.returncode == 0, done.stderr
    assert samples(done.stdout)["rolloutmq_leases",] == 1
    assert orjson.loads(command("metrics", "--json").stdout) == {"workers_wanted": {"demo": 2}}


def test_a_process_tells_of_its_calls_and_of_a_server_that_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path) as server:
        store = Store(server.url, deadline_s=DEADLINE_S)
        served = serve_process("worker w7", store, "0")
        Scene(store, "demo")
        server.kill()

        def come_back() -> None:
            until(lambda: store.retries, "a call that found no server")
            server.start()

        back = threading.Thread(target=come_back)
        back.start()
        store.retrying("look", store.client.ping)
        back.join()
        text = fetch(f"{served.url}/metrics")
        found = samples(text)
        assert found["rolloutmq_store_call_seconds_count", "create_run"] == 1
        assert found["rolloutmq_store_retries_total", "look"] == store.retries > 0
        assert 'process="worker w7"' in text
        served.close()
        store.close()
    monkeypatch.delenv("ROLLOUTMQ_METRICS_TOKEN", raising=False)
    for address, words in (
        ("0.0.0.0:0", "could be read"),
        ("here", "not an address"),
        ("1:99999", "not an address"),
    ):
        with pytest.raises(ConfigError, match=words):
            serve_process("worker", store, address)
