from __future__ import annotations

from pathlib import Path

from buffer.control.host_watch import HostWatch
from buffer.control.worker_record import HOST_NUMBERS, HeartbeatReport, WorkerState
from consumer.handle.step_log import TrainedStep
from rolloutmq.views.hosts import hosts
from tests.rolloutmq.populate import WEIGHTS, Scene


def test_each_host_has_its_processes_and_the_numbers_of_its_newest_heartbeat(
    scene: Scene, tmp_path: Path
) -> None:
    watch = HostWatch(tmp_path / "gone")
    assert "disk_free_bytes" not in watch.numbers()
    numbers = HostWatch(tmp_path).numbers()
    assert set(numbers) <= set(HOST_NUMBERS)
    assert 0 < numbers["memory_bytes"] < numbers["memory_total_bytes"]
    for worker, host, busy in (("w0", "a", 20), ("w1", "a", 30)):
        scene.run.store.client.hset(scene.run.keys.worker(worker), "host", host)
        pulse = HeartbeatReport(1, WEIGHTS, WorkerState.IDLE, **numbers | {"busy_percent": busy})
        scene.run.fleet.heartbeat(worker, scene.workers[worker], pulse, [])
    metrics = {"system/busy_percent": 7.0, "rewards/mean": 0.5}
    steps = [TrainedStep(1, "l", (), metrics, host="b")]
    first, second = hosts(scene.run.fleet.workers(), steps)
    assert second == {"host": "b", "processes": ["trainer"], "busy_percent": 7.0}
    assert first == {"host": "a", "processes": ["w0", "w1"], **numbers, "busy_percent": 30}
