from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from buffer.ids import trace_id
from buffer.redis.store import Store
from buffer.wire.rollout import PolicyVersion
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq.config.load import load_config
from rolloutmq.extensions.tracing import SWITCH, root_span_id, trace_run
from rolloutmq.launch.create import create_run
from tests.pipeline.site import Process, Site

WHO = {"enqueue": "producer", "take": "trainer", "rl.train": "trainer", "commit": "trainer"}
LIFE = ["enqueue", "wait", "claim", "rl.sample", "submit", "take", "rl.train", "commit"]


class Collector:
    """An OTLP endpoint.

    `spans`: those received, by trace. `who`: the process of each, by its span id.
    """

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.who: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def take(self, body: bytes) -> None:
        for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.spans[span.trace_id.hex()].append(span)
                self.who[span.span_id.hex()] = names["service.instance.id"]

    def named(self, trace: str, name: str) -> list[Span]:
        return [span for span in self.spans[trace] if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    monkeypatch.setenv(SWITCH, "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_one_trace_holds_a_groups_life_in_three_processes(
    make_site: Callable[..., Site], collector: Collector
) -> None:
    site = make_site(steps=2)
    site.server.start()
    # no lease runs out on a machine that is busy: each group is made once
    config = load_config(site.config, ["lease.lease_ms=120000"])
    store = Store(site.server.url)
    run = create_run(store, config, config.policy.model)  # type: ignore[arg-type]
    tracer = trace_run(run, "trainer")
    assert tracer
    consumer = RolloutConsumer(run)
    consumer.open()
    processes = [site.start("producer"), site.start("worker", "--id", "w0")]
    taken: list[str] = []
    for step in (1, 2):
        site.until(lambda: run.buffer.is_ready({"sums": 4}), "a batch")
        batch = consumer.take_batch(step, run.limits.mix().shares(step))
        taken += batch.manifest.gids
        consumer.commit(step, keep=step)
        weights = PolicyVersion(consumer.lineage, step)
        run.control.publish_weights(consumer.nonce, weights, str(site.model), "")
    consumer.finish()
    assert [process.wait() for process in processes] == [0, 0], site.words()
    assert [logged_by(process) for process in processes] == [
        {("site", "producer", "producer")},
        {("site", "worker", "w0")},
    ]
    consumer.close()
    tracer.flush()
    for gid in taken:
        check_life(collector, trace_id(run.nonce, gid), root_span_id(run.nonce, gid))
    assert any(collector.named(trace_id(run.nonce, gid), "wait") for gid in taken)
    store.close()


def logged_by(process: Process) -> set[tuple[str, str, str]]:
    """(run, role, id) of the lines in its log."""
    lines = [orjson.loads(line) for line in process.said().splitlines() if line.startswith("{")]
    return {(line["run"], line["role"], line["id"]) for line in lines}


def check_life(collector: Collector, trace: str, root: str) -> None:
    """Check that each stage is there once, in order, by the process that did it.

    All but the first are parts of the first.
    """
    found = {name: collector.named(trace, name) for name in LIFE}
    # a group that came between a look at the line and the claim has no wait
    assert [name for name in LIFE if len(found[name]) != 1] in ([], ["wait"])
    spans = [found[name][0] for name in LIFE if found[name]]
    # by its end, a stage has seen the beginning of the one before
    assert all(
        before.start_time_unix_nano <= after.end_time_unix_nano for before, after in pairwise(spans)
    )
    for span in spans:
        assert collector.who[span.span_id.hex()] == WHO.get(span.name, "w0")
    assert (spans[0].span_id.hex(), spans[0].parent_span_id) == (root, b"")
    assert {span.parent_span_id.hex() for span in spans[1:]} == {root}
    judged = collector.named(trace, "rl.reward")
    assert {span.parent_span_id for span in judged} == {found["rl.sample"][0].span_id}
