"""Which commit of the Hub each process of a run uses, over a run's whole life."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buffer.errors import ConfigError
from producer_workers.config.dataset import HuggingFaceSection
from rolloutmq.config.config import Config
from rolloutmq.config.fingerprint import origin_of
from rolloutmq.config.load import validate_config
from rolloutmq.config.sources import NOTE, fetch
from tests.fake_hub import FakeHub, fake_hub

MODEL, DATA = "qwen/tiny", "openai/gsm"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with fake_hub() as found:
        found.use(monkeypatch, tmp_path / "home")
        push(found, "first")
        yield found


def push(hub: FakeHub, content: str) -> tuple[str, str]:
    model = {"config.json": b"{}", "model.safetensors": content.encode()}
    data = {"train.jsonl": f'{{"question": "{content}", "answer": "1"}}\n'.encode()}
    return hub.push(MODEL, model, content), hub.push(f"datasets/{DATA}", data, content)


def config(folder: str = "runs/r", **revisions: str) -> Config:
    """Return a config with an evaluation that takes the training task's data set over."""
    dataset = {"kind": "hugging_face", "path": DATA, "split": "train"}
    policy = {"model": MODEL}
    if revision := revisions.get("model"):
        policy["revision"] = revision
    if revision := revisions.get("data"):
        dataset["revision"] = revision
    tree = {
        "run": {"name": "r", "dir": folder},
        "policy": policy,
        "tasks": {
            "sums": {"judge": "exact_match", "dataset": dataset},
            "held_out": {"eval_of": "sums"},
        },
    }
    return validate_config(tree, "test")


def revisions(found: Config) -> list[str | None]:
    datasets = [task.dataset for task in found.tasks.values()]
    assert all(isinstance(dataset, HuggingFaceSection) for dataset in datasets)
    return [found.policy.revision, *(getattr(dataset, "revision", "") for dataset in datasets)]


def test_a_run_keeps_the_commits_of_its_first_start_when_main_moves(hub: FakeHub) -> None:
    model, data = push(hub, "second")
    first = fetch(config())
    assert revisions(first) == [model, data, data]
    assert first.model_folder.name == model
    push(hub, "third")
    assert revisions(fetch(config())) == [model, data, data]
    assert fetch(fetch(config())) == first
    # another machine has the record of the run, and no folder of it
    origin = origin_of(first, first.model_folder)
    assert revisions(fetch(config("elsewhere"), origin)) == [model, data, data]
    assert not Path("elsewhere", NOTE).exists()
    assert origin_of(fetch(config("elsewhere"), origin), first.model_folder) == origin


def test_another_commit_is_refused_by_name_and_undoing_the_edit_is_accepted(hub: FakeHub) -> None:
    first = fetch(config())
    model, data = push(hub, "second")
    assert refusals(first, config(model="second")) == [
        f"[policy] model is {MODEL}@{model}, the run was made with {MODEL}@{first.policy.revision}: "
        "set revision to that commit"
    ]
    in_training, in_evaluation = refusals(first, config(data=data))
    assert in_training.startswith(f"[tasks.sums.dataset] is datasets/{DATA}@{data}, the run was")
    assert in_evaluation.startswith("[tasks.held_out.dataset] is")
    assert refusals(first, config()) == []
    assert refusals(first, config(model="first", data="first")) == []


def refusals(first: Config, edited: Config) -> list[str]:
    """Return why a run that was made with `first` cannot be continued with `edited`."""
    origin = origin_of(first, first.model_folder)
    now = fetch(edited)
    return list(origin.contradictions(origin_of(now, now.model_folder)))


def test_a_worker_downloads_no_data_and_a_changed_id_is_refused(hub: FakeHub) -> None:
    first = fetch(config())
    origin = origin_of(first, first.model_folder)
    hub.asked.clear()
    worker = fetch(config("elsewhere"), origin, with_data=False)
    assert list(origin.contradictions(origin_of(worker, worker.model_folder))) == []
    assert not any("datasets" in path for path in hub.asked)
    tree = config().model_dump(mode="json", exclude_unset=True)
    tree["policy"]["model"] = "qwen/other"
    hub.push("qwen/other", {"config.json": b"{}", "model.safetensors": b""})
    other = fetch(validate_config(tree, "test"))
    (why,) = origin.contradictions(origin_of(other, other.model_folder))
    assert "qwen/other@" in why


def test_folders_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(MODEL).mkdir(parents=True)
    Path(DATA).mkdir(parents=True)
    assert fetch(config()) == config()
    assert config().model_folder == Path(MODEL)


def test_a_revision_of_a_folder_is_an_error_with_both_names() -> None:
    tree = {
        "run": {"name": "r"},
        "policy": {"model": "/models/mine", "revision": "v1"},
        "tasks": {
            "sums": {
                "judge": "exact_match",
                "dataset": {"kind": "hugging_face", "path": "./here", "subset": "main"},
            }
        },
    }
    with pytest.raises(ConfigError) as caught:
        validate_config(tree, "test")
    assert "revision = v1 is for a model on the Hub: /models/mine is none" in str(caught.value)
    assert "subset is for a data set on the Hub: here is none" in str(caught.value)
