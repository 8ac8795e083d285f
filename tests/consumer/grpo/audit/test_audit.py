"""Workers that lie about their logprobs or weights, and what an auditor finds."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from buffer.errors import ConfigError, WireError
from buffer.ledger.audits import AuditPosition, Verdict
from buffer.redis.signing import Key, write_keys
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import SamplingMask
from consumer.grpo.audit.audit_log import FILE, groups_of
from consumer.grpo.audit.auditor import Auditor, check_auditable
from rolloutmq.cli import main
from rolloutmq.config.config import Config
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.run_view import read_run_view
from tests.consumer.conftest import Trainers
from tests.consumer.grpo.audit.yard import BATCH, Change, Yard, leave
from tests.consumer.grpo.models.tiny import build_model, make_group
from tests.servers import on_both
from tests.waits import until

TOML = """
[run]
name = "{name}"
dir = "{folder}"
[plan]
steps = 5
batch_size = 3
[tasks.math]
judge = "exact_match"
dataset = {{ kind = "jsonl", path = "problems.jsonl" }}
[trainer]
device = "cpu"
[engine]
kind = "transformers"
[audit]
share = 1.0
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("versions")
    return [build_model(folder, seed=seed) for seed in range(3)]


@pytest.fixture
def yard(run: Run, trainer: Trainers, models: list[Path], tmp_path: Path) -> Yard:
    yard = Yard(run, trainer(run), models, tmp_path)
    yard.publish(0)
    return yard


def lower(rollouts: list[RolloutState]) -> None:
    """Claim that every token was less likely."""
    for rollout in rollouts:
        rollout.logprobs = rollout.logprobs - np.float32(1)


def lower_one(rollouts: list[RolloutState]) -> None:
    """Claim so of one of the rollouts only."""
    lower(rollouts[1:2])


def lower_with_masks(rollouts: list[RolloutState]) -> None:
    """Claim that no other token could be sampled, for which a trainer's logprobs are 0."""
    for rollout in rollouts:
        rollout.logprobs = np.zeros_like(rollout.logprobs)
        ones = np.ones(len(rollout.response_ids), "<i4")
        rollout.sampling_mask = SamplingMask(ones, rollout.response_ids)


def name_top_p(rollouts: list[RolloutState]) -> None:
    lower_with_masks(rollouts)
    for rollout in rollouts:
        rollout.sample_params = SampleParams(top_p=0.9)


def name_no_weights(rollouts: list[RolloutState]) -> None:
    rollouts[0].spans = []


def counts(yard: Yard) -> Mapping[str, Mapping[Verdict, int]]:
    return yard.run.audits.read().groups


def is_barred(yard: Yard, worker: str) -> bool:
    return any(row.id == worker and row.is_barred for row in yard.run.fleet.workers())


@on_both
@pytest.mark.parametrize(
    ("change", "sampled_by"),
    [(lower, None), (lower_one, None), (lower_with_masks, None), (leave, 0)],
    ids=["all logprobs", "one rollout", "masks of one token", "the policy of another version"],
)
def test_a_worker_that_differs_is_barred_and_its_groups_are_listed(
    yard: Yard, change: Change, sampled_by: int | None
) -> None:
    newest = yard.publish(1)
    honest = [yard.submit("honest") for _ in range(2)]
    forged = yard.submit("hostile", change, sampled_by=sampled_by)
    ready = yard.submit("hostile")
    held = yard.claim("hostile")
    yard.take(1)
    assert yard.auditor().audit_next()
    assert not yard.auditor().audit_next()

    assert counts(yard) == {"honest": {"agrees": 2}, "hostile": {"differs": 1}}
    assert yard.run.record(held[0].gid)["stage"] == "waiting"
    yard.nonces.pop("hostile")  # fenced: it registers again
    assert yard.claim("hostile") == []
    assert is_barred(yard, "hostile")
    assert not is_barred(yard, "honest")
    events = [fields for _, (_, name, fields) in yard.run.events.read() if name == "audit_failed"]
    assert [(fields["worker"], fields["gid"]) for fields in events] == [("hostile", forged)]
    symptoms = "\n".join(symptom.what for symptom in diagnose(read_run_view(yard.run)))
    assert f"worker hostile failed an audit of {forged}: its logprobs are" in symptoms
    assert f"weights {newest} (root mean square" in symptoms
    made = groups_of(yard.config.run.folder, "hostile")
    assert [(group.step, group.gid, group.weights) for group in made] == [(1, forged, str(newest))]
    living = {row.gid for row in yard.run.groups.find({"owner": "hostile"})}
    assert living == {forged, ready}
    assert {group.gid for group in groups_of(yard.config.run.folder, "honest")} == set(honest)


def test_a_worker_that_writes_into_the_index_does_not_end_the_auditor(yard: Yard) -> None:
    """With the password of a worker, records may contain anything; `audits` is out of its reach."""
    raw: Any = yard.run.store.control
    raw.hset(yard.run.keys.audits, "position", "junk")
    odd: list[dict[str, str | bytes]] = [
        {"owner": b"\xff\n"}, {"owner": "a b"}, {"lineage": b"\xff"}
    ]  # fmt: skip
    for fields in odd:
        raw.hset(yard.run.keys.group(yard.submit("w1", lower)), mapping=fields)
    yard.take(1)
    assert yard.auditor().audit_next()
    assert counts(yard) == {"": {"impossible": 2}, "w1": {"differs": 1}}
    assert not yard.auditor().audit_next()


def test_an_audit_blames_the_owner_of_the_key(yard: Yard, tmp_path: Path) -> None:
    """A worker can write another name into the record of its group."""
    keys = tmp_path / "workers.keys"
    write_keys(keys, {"hostile": [Key.new("hostile").secret]})
    yard.run.sign_with(Key.read(keys))
    for _ in range(BATCH):
        gid = yard.submit("hostile", lower)
        yard.run.store.control.hset(yard.run.keys.group(gid), "owner", "honest")
    yard.run.check_signatures(keys)
    yard.take(1)
    assert yard.auditor().audit_next()
    assert counts(yard) == {"hostile": {"differs": BATCH}}
    assert not is_barred(yard, "honest")


def test_masks_that_the_sampling_explains_are_its_workers_word(yard: Yard) -> None:
    for _ in range(BATCH):
        yard.submit("w1", name_top_p)
    yard.take(1)
    yard.auditor().audit_next()
    assert counts(yard) == {"w1": {"impossible": BATCH}}


def test_what_cannot_be_audited_is_counted_and_bars_nobody(yard: Yard) -> None:
    """Weights that never were, tokens without weights, and a group that two workers made."""
    unknown = PolicyVersion(yard.consumer.lineage, 0)
    yard.submit("inventive", stamp=unknown._replace(lineage="never"))
    yard.submit("silent", name_no_weights)
    yard.submit("hostile", lower, status=Status.ABORTED)
    yard.run.jobs.reissue(yard.crew.producer, "math", "aborted", 1000)
    continued = yard.submit("honest")
    assert continued in yard.take(1)
    yard.auditor().audit_next()
    assert counts(yard) == {
        "inventive": {"impossible": 1},
        "silent": {"impossible": 1},
        "": {"impossible": 1},
    }
    assert yard.run.audits.read().failed == {}


def test_no_group_sends_the_auditor_to_other_folders_or_to_many_versions() -> None:
    for spans in (
        [VersionSpan(0, 1, 3, "../../weights")],
        [VersionSpan(n, 1, n, "main") for n in range(40)],
    ):
        group = make_group(1, lengths=(40,))
        group.states[0].spans = spans
        with pytest.raises(WireError, match="name"):
            check_auditable(RolloutGroup(group.gid, group.task, group.states))


def test_groups_and_weights_may_be_gone(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    auditor = yard.auditor()
    for version in range(3):  # two are kept
        yard.publish(version)
        yard.submit("w1", stamp=PolicyVersion(yard.consumer.lineage, version))
    yard.take(1)
    auditor.audit_next()
    assert counts(yard) == {"w1": {"impossible": 1, "agrees": 2}}
    assert "are not kept any more" in caplog.text
    for step in (2, 3, 4):
        for _ in range(BATCH):
            yard.submit("w1", lower)
        yard.take(step)
    yard.consumer.commit(3, keep=3)  # frees 2 and 3
    assert auditor.audit_next()
    account = yard.run.audits.read()
    assert (account.position.step, account.missed) == (4, 2)
    assert counts(yard) == {"w1": {"impossible": 1, "agrees": 2, "differs": BATCH}}


@pytest.mark.parametrize(
    "section",
    [{"learner": {"lora": {}}}, {"learner": {"allow_truncated_sampling": True}},
     {"engine": {"kind": "simulated"}}],
)  # fmt: skip
def test_what_would_bar_honest_workers_is_refused(yard: Yard, section: dict[str, Any]) -> None:
    config = yard.config.model_dump(exclude_unset=True) | section
    with pytest.raises(ConfigError, match="cannot be audited"):
        Auditor(yard.run, Config.model_validate(config))


def test_an_auditor_dies_at_any_point_and_of_two_one_counts(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(BATCH):
        yard.submit("w1")
    yard.take(1)
    record = yard.run.audits.record

    def die(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(yard.run.audits, "record", die)
    with pytest.raises(KeyboardInterrupt):
        yard.auditor().audit_next()
    assert counts(yard) == {}

    def be_slow(before: AuditPosition, *rest: object, **more: object) -> bool:
        assert record(before, *rest, **more)  # type: ignore[arg-type]
        assert record(before, *rest, **more)  # type: ignore[arg-type]  # its reply was lost
        return record(before, AuditPosition(1, 1), [])

    monkeypatch.setattr(yard.run.audits, "record", be_slow)
    assert yard.auditor().audit_next()
    assert counts(yard) == {"w1": {"agrees": BATCH}}
    yard.run.store.control.hset(yard.run.keys.audits, mapping={"agrees:w2": "x", "missed": "-"})
    assert counts(yard) == {"w1": {"agrees": BATCH}}
    torn = yard.config.run.folder / FILE
    torn.write_bytes(torn.read_bytes() + b'{"step":2,"gro')
    assert len(list(groups_of(yard.config.run.folder, "w1"))) == BATCH


def test_batches_that_are_taken_again_after_a_rollback_are_audited_again(
    yard: Yard, trainer: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        for _ in range(BATCH):
            yard.submit("w1")
        yard.take(step)
        yard.auditor().audit_next()
    before = yard.run.audits.read().position
    yard.consumer.close()
    yard.consumer = trainer(yard.run, take_over=True)
    assert yard.take(1)  # the same record, delivered again
    assert not yard.auditor().audit_next()
    # the server lost the second batch, and another one is taken for the step
    yard.run.store.control.hset(yard.run.keys.ledger("train"), "taken", 1)
    yard.run.store.control.delete(yard.run.keys.batch("train", 2))
    yard.publish(1)
    for _ in range(BATCH):
        yard.submit("w1", lower)
    yard.take(2)
    assert yard.auditor().audit_next()
    assert before.precedes(yard.run.audits.read().position)
    assert counts(yard) == {"w1": {"agrees": 2 * BATCH, "differs": BATCH}}


@pytest.fixture
def command(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Run `rolloutmq ARGS…` in this process, and return what it prints."""
    monkeypatch.setenv("REDIS_URL", yard.run.store.url)
    monkeypatch.setattr("rolloutmq.cli.processes.log_json", lambda *_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rolloutmq", *args])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
        return capsys.readouterr().out

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_command_audits_until_it_is_stopped(
    yard: Yard, command: Callable[..., str], tmp_path: Path
) -> None:
    for _ in range(BATCH):
        yard.submit("w1", lower)
    yard.take(1)
    folder = yard.config.run.folder
    (folder / "run.json").write_bytes(orjson.dumps({"nonce": yard.run.nonce}))
    config = tmp_path / "mine.toml"
    config.write_text(TOML.format(name=yard.run.name, folder=folder))

    def stop_it() -> None:
        until(lambda: counts(yard), "the command has audited a batch")
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop_it)
        command("audit", str(config))
        stopped.result()
    assert counts(yard) == {"w1": {"differs": BATCH}}
    name = ("--run", yard.run.name)
    assert command("workers", "--groups", "w1", "--run-dir", str(folder), *name).count("taken") == 3
    assert "audits of" in command("workers", *name)
