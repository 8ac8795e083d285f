from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.errors import ConfigError, Fenced
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.continuation import check_origin, record_origin
from buffer.run.origin import FIELD, Origin
from buffer.run.run import Run
from buffer.run.settings import LiveSettings, LiveTaskSettings
from rolloutmq.config.config import Config
from rolloutmq.config.fingerprint import origin_of
from rolloutmq.config.load import load_config
from rolloutmq.launch.create import create_run
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import FIRST, Scene

TASK = """
[tasks.{name}]
judge = "exact_match"
prompt_repeat_k = {k}
dataset = {{ kind = "jsonl", path = "{path}" }}
"""


class Site:
    """A config in a folder that is edited between two starts of its run."""

    def __init__(self, folder: Path, store: Store, name: str) -> None:
        self.folder = folder
        self.store = store
        self.name = name
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_bytes(orjson.dumps({"hidden_size": 64}))
        (self.model / "tokenizer.json").write_text("{}", encoding="utf-8")
        self.rows = 40
        self.sections = ""
        self.seed = 0
        self.tasks = {"math": 4, "logic": 4}
        for task in ("math", "logic", "maths"):
            self.write(task, self.rows)

    def write(self, task: str, rows: int) -> None:
        name = task.removesuffix("s")
        lines = [orjson.dumps({"question": f"{name} {n}", "answer": str(n)}) for n in range(rows)]
        (self.folder / f"{task}.jsonl").write_bytes(b"\n".join(lines))

    def config(self) -> Config:
        text = f"""
[run]
name = "{self.name}"
dir = "{self.folder}/run"
seed = {self.seed}
[policy]
model = "{self.model}"
{self.sections}
"""
        for name, k in self.tasks.items():
            text += TASK.format(name=name, k=k, path=self.folder / f"{name}.jsonl")
        file = self.folder / "run.toml"
        file.write_text(text, encoding="utf-8")
        return load_config(file)

    def start(self) -> Run:
        return create_run(self.store, self.config(), self.model)

    def origin(self) -> Origin:
        return origin_of(self.config(), self.model)


@pytest.fixture
def site(tmp_path: Path, store: Store, run_name: str) -> Site:
    return Site(tmp_path, store, run_name)


def rename(site: Site) -> None:
    site.tasks = {"maths": 4, "logic": 4}


def reseed(site: Site) -> None:
    site.seed = 1


EDITS: dict[str, tuple[Callable[[Site], object], str]] = {
    "a renamed task": (rename, "task math is named maths now"),
    "another seed": (reseed, r"\[run\] seed is 1, the run was made with 0"),
    "rows added": (lambda site: site.write("math", 41), r"\[tasks.math.dataset\] is not"),
    "another tokenizer": (
        lambda site: (site.model / "tokenizer.json").write_text("{ }", encoding="utf-8"),
        "another tokenizer",
    ),
    "another size": (
        lambda site: (site.model / "config.json").write_text('{"hidden_size": 65}', "utf-8"),
        "another architecture",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_gives_draws_another_meaning_is_refused_and_changes_nothing(
    site: Site, edit: str
) -> None:
    run = site.start()
    before = run.store.client.hgetall(run.keys.meta)
    change, reason = EDITS[edit]
    change(site)
    with pytest.raises(ConfigError, match=reason) as refused:
        site.start()
    assert "new run" in refused.value.hint
    with pytest.raises(ConfigError, match=reason):
        check_origin(run.store, run.keys, site.origin())
    assert run.store.client.hgetall(run.keys.meta) == before


def test_a_task_that_is_gone_is_kept_until_it_is_back(site: Site) -> None:
    run = site.start()
    assert run.changes == []
    site.tasks = {"logic": 4}
    site.sections = "[plan]\nbatch_size = 8"
    run = site.start()
    assert run.changes[0] == "batch_size: 16 → 8, from step 1 on"
    assert run.changes[1].startswith("task math is gone")
    assert run.limits.mix().shares(1) == {"logic": 8, "math": 0}
    assert site.start().changes == []
    with pytest.raises(ConfigError, match="no training task 'math'"):
        run.set(LiveSettings(tasks={"math": LiveTaskSettings(weight=2.0)}))
    site.tasks = {"logic": 4, "maths": 4}
    with pytest.raises(ConfigError, match="task math is named maths now"):
        site.start()
    site.tasks = {"math": 4, "logic": 4}
    site.write("math", 41)
    with pytest.raises(ConfigError, match="not the data set"):
        site.start()
    site.write("math", site.rows)
    assert site.start().changes == ["task math is back, from step 1 on"]


def test_group_sizes_are_those_of_the_producer_that_draws(site: Site) -> None:
    run = site.start()
    old = site.origin()
    site.tasks["math"] = 8
    changes = ["tasks.math.prompt_repeat_k: 4 → 8, once a producer starts with it"]
    assert site.start().changes == changes
    assert site.start().changes == changes  # a producer with the old config may still draw
    producer = new_nonce()
    run.control.open_producer(producer)
    resized = record_origin(run.store, run.keys, site.origin(), producer)
    assert resized == ["tasks.math.prompt_repeat_k: 4 → 8, from draw 0 on"]
    assert record_origin(run.store, run.keys, site.origin(), producer) == []
    assert site.start().changes == []
    run.control.open_producer(new_nonce(), take_over=True)
    with pytest.raises(Fenced):
        record_origin(run.store, run.keys, old, producer)


def test_a_run_without_a_record_gets_one(site: Site) -> None:
    run = site.start()
    run.store.client.hdel(run.keys.meta, FIELD)
    assert site.start().changes == []
    assert Origin.from_meta(_meta(run)) == site.origin()
    run.store.client.hset(run.keys.meta, FIELD, "{")
    check_origin(run.store, run.keys, site.origin())


def test_what_one_machine_cannot_see_another_one_records(site: Site) -> None:
    seen = site.origin()
    data = site.folder / "math.jsonl"
    data.rename(site.folder / "away")
    run = site.start()
    assert Origin.from_meta(_meta(run)) != seen
    (site.folder / "away").rename(data)
    producer = new_nonce()
    run.control.open_producer(producer)
    record_origin(run.store, run.keys, site.origin(), producer)
    assert Origin.from_meta(_meta(run)) == seen
    data.rename(site.folder / "away")
    assert site.start().changes == []
    assert Origin.from_meta(_meta(run)) == seen


def _meta(run: Run) -> dict[str, str]:
    raw: Any = run.store.client.hgetall(run.keys.meta)
    return {name.decode(): value.decode() for name, value in raw.items()}


def test_a_run_with_a_renamed_task_trains_on_and_the_account_adds_up(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(stale_threshold=100)
    scene.open_producer()
    trainer = Trainer(scene)

    def continue_with(*names: str) -> Run:
        tasks = {name: TaskLimits() for name in names}
        limits = RunLimits(stale_threshold=100, tasks=tasks)
        return Run.create(scene.store, scene.name, scene.run.nonce, limits, FIRST, "/w")

    scene.ready(*[0] * 6)
    for step in (1, 2, 3):
        trainer.train(step)
    position = trainer.save(keep=1)
    scene.enqueue(2)
    for names in (("other",), ("math", "other"), ("other",)):
        scene.run = continue_with(*names)
        trainer.open(position)
        assert scene.take(2).step == 2
        scene.run.janitor.sweep()
        scene.check()
    scene.run = continue_with("math")
    assert trainer.open(position).recovery.changed == 0
    trainer.position = position
    assert scene.take(4).step == 4
    scene.check()
