from __future__ import annotations

import random
import resource
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from buffer.job import PayloadRef
from buffer.manifest import Manifest, ManifestEntry
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from consumer.grpo.reporting import metric_writers
from consumer.grpo.reporting.metric_writers import MetricWriter, SampleWriter, choose
from consumer.grpo.reporting.metrics import BatchColumns
from consumer.grpo.reporting.reporter import MOST_WAITING, Reporter
from consumer.handle.sample_log import SampleLog, TokenTexts, describe_sample, sample_files
from rolloutmq.config.config import Config

LARGE = 2**30


def sample(step: int, life: int, size: int = 10) -> dict[str, Any]:
    noise = random.Random(step * 1000 + life).randbytes(size).hex()
    return {
        "step": step,
        "gid": f"math-{step:010d}",
        "life": life,
        "members": [{"response": f"math- {noise}"}],
    }


def as_logged(run_dir: Path, last: int) -> dict[int, int]:
    log = SampleLog(run_dir)
    return {step: found[0]["life"] for step in range(1, last + 1) if (found := log.read(step))}


@pytest.mark.parametrize("seed", range(8))
def test_the_newest_trainer_counts_whichever_died_where(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_writers, "STEPS_PER_FILE", 7)
    chance = random.Random(seed)
    expected: dict[int, int] = {}
    start = 0
    for life in range(1, 7):
        writer = SampleWriter(tmp_path, LARGE, start + 1)
        step = start
        before = sample_files(tmp_path)
        for step in range(start + 1, start + chance.randint(1, 50)):
            # every second trainer leaves out what it has no time for
            if life % 2 and chance.random() < 0.1:
                continue
            expected = {n: of for n, of in expected.items() if n <= start or of == life}
            expected[step] = life
            writer.write_samples(step, [sample(step, life)])
        if sample_files(tmp_path) != before and chance.random() < 0.5:
            newest = sample_files(tmp_path)[-1].path
            torn = chance.randint(12, 40)  # of a member of over 60 bytes, 8 of them a checksum
            newest.write_bytes(newest.read_bytes()[:-torn])
            expected.pop(max(expected))
        writer.close()
        assert as_logged(tmp_path, step + 60) == expected
        assert (SampleLog(tmp_path).steps() or (0, 0))[1] == max(expected)
        found = [(line["step"], line["life"]) for line in SampleLog(tmp_path).search("MATH-")]
        assert found == sorted(expected.items(), reverse=True)
        start = chance.randint(max(0, step - 30), step)


def test_a_full_disk_costs_the_steps_that_found_it_full(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, LARGE, 1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = []
    try:
        for step in range(1, 30):
            # from step 10 to 19 a write gets no further than 100 bytes
            size = sum(file.path.stat().st_size for file in sample_files(tmp_path))
            limit = size + 100 if 10 <= step < 20 else limits[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                writer.write_samples(step, [sample(step, 1, size=300)])
            except OSError:
                failed.append(step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    writer.close()
    assert failed == list(range(10, 20))
    assert set(as_logged(tmp_path, 40)) == set(range(1, 30)) - set(failed)


def test_the_oldest_files_are_deleted_above_the_limit(tmp_path: Path) -> None:
    most = 2**20
    writer = SampleWriter(tmp_path, most, 1)
    for step in range(1, 300):
        writer.write_samples(step, [sample(step, 1, size=8000)])
        files = sample_files(tmp_path)
        assert sum(file.path.stat().st_size for file in files) <= most
    writer.close()
    first, last = SampleLog(tmp_path).steps() or (0, 0)
    assert (first > 100, last) == (True, 299)
    assert set(as_logged(tmp_path, 299)) == set(range(first, 300))


def test_best_worst_and_truncated_and_a_seeded_draw_are_chosen() -> None:
    none = BatchColumns.of([], np.zeros(0, "<f4"))
    scores = {f"math-{n:010d}": float(n % 5) for n in range(12)}
    whole = replace(none, gids=[*scores], means=[*scores.values()], truncated=[0] * 12)
    chosen = choose(whole, 4, seed=3, step=50)
    assert chosen == choose(whole, 4, seed=3, step=50)
    assert list(chosen.values()) == ["best", "worst", "random", "random"]
    assert [scores[gid] for gid in chosen][:2] == [4.0, 0.0]
    draws = {frozenset(choose(whole, 4, 3, step)) for step in range(20)}
    assert draws != {frozenset(chosen)}
    worst = list(chosen)[1]
    lengths = {worst: 8, "math-0000000007": 2, "math-0000000008": 1}
    cut = replace(whole, truncated=[lengths.get(gid, 0) for gid in scores])
    chosen = choose(cut, 4, 3, 1)
    assert (chosen[worst], chosen["math-0000000007"]) == ("worst", "truncated")
    assert len(choose(cut, 99, 3, 1)) == 12
    assert list(choose(cut, 1, 3, 1).values()) == ["best"]
    assert choose(cut, 0, 3, 1) == {} == choose(none, 4, 3, 1)


def group(step: int) -> RolloutGroup:
    state = RolloutState(
        messages=[{"role": "user", "content": "1 + 1?"}],
        prompt_ids=np.arange(3, dtype="<i4"),
        response="\x1b[31m\u202e2\x00",
        response_ids=np.arange(2, dtype="<i4"),
        logprobs=np.zeros(2, "<f4"),
        spans=[VersionSpan(0, 2, 4, "l0")],
        reward={"score": 1.0},
        status=Status.COMPLETED,
    )
    return RolloutGroup(f"math-{step:010d}", "math", [state])


class Stuck(MetricWriter):
    """A destination that stands still until it is let go, and then fails."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def write_samples(self, step: int, samples: object) -> None:
        self.goes_on.wait()
        raise RuntimeError("no more")


def test_a_destination_that_hangs_or_fails_delays_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    math = {"judge": "exact_match", "dataset": {"kind": "jsonl", "path": "p"}}
    config = Config.model_validate(
        {"run": {"name": "demo", "dir": tmp_path}, "tasks": {"math": math}}
    )
    reporter = Reporter(config, None, tmp_path)  # type: ignore[arg-type]  # it reads no group again
    stuck = Stuck()
    reporter.open([stuck, SampleWriter(tmp_path, LARGE, 1)])
    steps = range(1, MOST_WAITING + 20)
    for step in steps:
        made = group(step)
        entry = ManifestEntry(PayloadRef(made.gid, "t", 1, 1, ""), 1, 4)
        columns = BatchColumns.of([made], np.zeros(1, "<f4"))
        reporter.add_samples(Manifest(step, "", (entry,)), columns, [made])
    assert "slower than the train steps" in caplog.text
    stuck.goes_on.set()
    assert reporter.flush()
    reporter.close()
    assert caplog.text.count("no more") == 1
    log = SampleLog(tmp_path)
    logged = [step for step in steps if log.read(step)]
    assert 0 < len(logged) < len(steps)
    (line,) = log.read(1)
    assert line == describe_sample(group(1), 1, "best", -4, TokenTexts([]))


def test_a_browser_gets_the_text_of_each_token(model_dir: Path, tmp_path: Path) -> None:
    question = "4 + 17 - 2 ="
    ids = AutoTokenizer.from_pretrained(model_dir).encode(question, add_special_tokens=False)
    texts = TokenTexts([tmp_path / "no model here", model_dir]).of(ids)
    assert texts is not None
    assert "".join(texts) == question
    assert len(texts) == len(ids) > 3
    assert TokenTexts([tmp_path]).of(ids) is None
