"""What `rolloutmq set` changed belongs to the run, whatever is started, edited or lost."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from buffer.errors import ConfigError, RunDamaged
from buffer.ids import new_nonce
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.run.settings import (
    FIELD,
    FILE,
    KeptSettings,
    SettingsRecord,
    parse_change,
    setting_values,
)
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config
from rolloutmq.launch.create import create_run
from tests.servers import on_both
from tests.thoroughness import examples

pytestmark = on_both

CONFIG = Path(__file__).with_name("settings_survive.toml").read_text(encoding="utf-8")

MATH_WEIGHT, IN_FLIGHT = "tasks.math.weight", "tasks.math.max_in_flight"
VALUES: dict[str, list[Any]] = {
    "max_tries": [3, 5, 7],
    "steps": [50, 60, 70],
    "max_staleness": [0, 1, 2],
    "max_ahead": [0, 1, 2],
    "concurrency": [2, 3, 4],
    "low_bytes": [1_000_000_000, 2_000_000_000, 3_000_000_000],
    MATH_WEIGHT: [1.0, 2.0, 3.0],
    IN_FLIGHT: [None, 40, 50],
}
"""Values that the file and `set` give; the file has shares of a budget for `low_bytes`."""
BUDGET = 10_000_000_000


class Site:
    """A config in a folder, and the run that is started from it."""

    def __init__(self, folder: Path, store: Store, name: str) -> None:
        self.folder = folder
        self.store = store
        self.name = name
        self.file = {name: values[0] for name, values in VALUES.items()}
        self.budget: int | None = BUDGET
        (folder / "model").mkdir()
        for task in ("math", "code"):
            (folder / f"{task}.jsonl").write_bytes(orjson.dumps({"question": task, "answer": 1}))

    def config(self) -> Config:
        values = {name.rpartition(".")[2]: value for name, value in self.file.items()}
        limit = values.pop("max_in_flight")
        values["low_bytes"] /= BUDGET
        text = CONFIG.format(
            name=self.name,
            folder=self.folder,
            budget=self.budget,
            max_in_flight="" if limit is None else f"max_in_flight = {limit}",
            **values,
        )
        if self.budget is None:
            text = text.replace("budget_bytes = None\n", "")
        (self.folder / "run.toml").write_text(text, encoding="utf-8")
        return load_config(self.folder / "run.toml")

    def start(self, *, by_hand: bool = True) -> Run:
        return create_run(self.store, self.config(), self.folder / "model", by_hand=by_hand)

    def open(self) -> Run:
        return Run.open(self.store, self.name)

    def set(self, *assignments: str) -> dict[str, tuple[Any, Any]]:
        """As the command does it, which writes into the folder, too."""
        run = self.open()
        wanted, restored = parse_change(assignments)
        return run.set(wanted, restored=restored, by="ann@host", folder=self.folder / "run")

    def lose_everything(self) -> None:
        raw = self.store.client
        for key in raw.keys(f"rmq:{{{self.name}}}:*"):
            raw.delete(key)


@pytest.fixture
def site(tmp_path: Path, store: Store, run_name: str) -> Site:
    return Site(tmp_path, store, run_name)


class Model:
    """What the config was at the last start by hand, and what was set since."""

    def __init__(self, file: dict[str, Any]) -> None:
        self.config = dict(file)
        self.overrides: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        self.overrides[name] = value

    def start_by_hand(self, file: dict[str, Any]) -> None:
        kept = [name for name in self.overrides if file[name] == self.config[name]]
        self.overrides = {name: self.overrides[name] for name in kept}
        self.config = dict(file)

    def value(self, name: str) -> Any:
        return self.overrides.get(name, self.config[name])

    def differing(self) -> dict[str, Any]:
        # the config of a worker, not of the run, has the concurrency: it always differs
        return {
            name: value
            for name, value in self.overrides.items()
            if value != self.config[name] or name == "concurrency"
        }


NAMES = st.sampled_from(list(VALUES))
PLACES = st.integers(0, 2)


class Histories(RuleBasedStateMachine):
    """Set, edit, start and lose in any order, each with a run of its own."""

    store: Store
    prefix: str
    numbers = count()

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.site = Site(Path(self.folder.name), self.store, f"{self.prefix}-{next(self.numbers)}")
        self.site.start()
        self.model = Model(self.site.file)

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(name=NAMES, place=PLACES)
    def set_value(self, name: str, place: int) -> None:
        value = VALUES[name][place]
        if value is None:  # no value of TOML unsets one
            self.restore(name)
            return
        self.site.set(f"{name}={value}")
        self.model.set(name, value)

    @rule(name=NAMES)
    def restore(self, name: str) -> None:
        self.site.set(f"{name}=config")
        self.model.overrides.pop(name, None)

    @rule(name=NAMES, place=PLACES)
    def edit(self, name: str, place: int) -> None:
        self.site.file[name] = VALUES[name][place]

    @rule()
    def a_process_starts_again(self) -> None:
        assert self.site.start(by_hand=False).changes == []

    @rule()
    def start_by_hand(self) -> None:
        before = {name: self.model.value(name) for name in VALUES}
        changes = self.site.start().changes
        self.model.start_by_hand(self.site.file)
        changed = {name for name in VALUES if self.model.value(name) != before[name]}
        told = {change.partition(":")[0] for change in changes}
        assert told - {"concurrency"} == changed - {"concurrency"}

    @rule()
    def lose_everything_and_start_by_hand(self) -> None:
        self.site.lose_everything()
        self.site.start()
        self.model.start_by_hand(self.site.file)

    @invariant()
    def every_process_hears_what_holds(self) -> None:
        run = self.site.open()
        found = setting_values(run.limits)
        expected = {name: self.model.value(name) for name in VALUES}
        expected["concurrency"] = self.model.overrides.get("concurrency")
        assert {name: found.get(name) for name in VALUES} == expected
        listed = {name: each.value for name, each in run.settings.overrides.items()}
        assert listed == self.model.differing()


def test_what_was_set_holds_over_all_histories(store: Store, run_name: str) -> None:
    Histories.store, Histories.prefix = store, run_name
    run_state_machine_as_test(
        Histories,
        settings=settings(max_examples=examples(20), stateful_step_count=15, deadline=None),
    )


def test_a_change_of_the_server_alone_gives_nothing_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.budget = None
    monkeypatch.setattr("rolloutmq.launch.create.maxmemory_bytes", lambda store: 10 * BUDGET)
    site.start()
    site.set("low_bytes=1234567")
    monkeypatch.setattr("rolloutmq.launch.create.maxmemory_bytes", lambda store: 20 * BUDGET)
    run = site.start()
    assert run.limits.low_bytes == 1234567
    assert run.settings.configured["low_bytes"] == int(15 * BUDGET * 0.1)


def test_a_value_that_an_edited_config_leaves_no_room_for_is_given_up(site: Site) -> None:
    site.start()
    site.set("low_bytes=8900000000", "steps=70")
    config = site.config()
    memory = config.memory.model_copy(update={"high_water": 0.8})
    edited = config.model_copy(update={"memory": memory})
    run = create_run(site.store, edited, site.folder / "model")
    assert run.limits.low_bytes == VALUES["low_bytes"][0]
    assert run.limits.steps == 70


def test_new_weights_hold_from_the_step_for_which_they_were_set(site: Site) -> None:
    site.start()
    site.set("tasks.math.weight=3")
    before = site.open().limits.mix()
    for by_hand in (False, True):
        mix = site.start(by_hand=by_hand).limits.mix()
        for step in range(1, 6):
            assert mix.shares(step) == before.shares(step)
    site.set("tasks.code.weight=0")
    site.file[MATH_WEIGHT] = 2.0
    limits = site.start().limits
    assert limits.newest_weights() == {"math": 2.0, "code": 0.0}
    assert limits.mix().shares(1) == {"math": 16, "code": 0}


def test_a_setting_is_known_with_its_time_and_who_set_it(site: Site) -> None:
    site.start()
    site.set("max_tries=7")
    first = site.open().settings.overrides["max_tries"]
    assert (first.value, first.by) == (7, "ann@host")
    site.set("max_tries=7", "steps=60")
    assert site.open().settings.overrides["max_tries"] == first


@pytest.mark.parametrize("name", ["nonsense", "tasks.none.weight", "tasks.math.nonsense", "tasks"])
def test_only_a_setting_can_have_the_value_of_the_config(site: Site, name: str) -> None:
    site.start()
    before = site.store.client.hgetall(site.open().keys.meta)
    with pytest.raises(ConfigError, match=name):
        site.set(f"{name}=config")
    assert site.store.client.hgetall(site.open().keys.meta) == before


def test_a_task_that_is_gone_takes_its_settings_along(site: Site) -> None:
    site.start()
    site.set(f"{IN_FLIGHT}=50", "tasks.math.weight=0", "max_tries=7")
    config = site.config()
    tasks = {name: task for name, task in config.tasks.items() if name != "code"}
    run = create_run(site.store, config.model_copy(update={"tasks": tasks}), site.folder / "model")
    # with weight 0 for its only task it could not train
    assert set(run.settings.overrides) == {IN_FLIGHT, "max_tries"}
    assert run.limits.newest_weights() == {"math": 1.0, "code": 0.0}


def test_a_damaged_record_is_reported_and_the_copy_of_another_run_is_not_used(site: Site) -> None:
    run = site.start()
    site.set("max_tries=7")
    site.store.client.hset(run.keys.meta, FIELD, "{")
    for call in (site.open, site.start):
        with pytest.raises(RunDamaged):
            call()
    kept = KeptSettings(site.folder / "run", run.nonce)
    assert kept.read() != SettingsRecord()
    assert KeptSettings(site.folder / "run", "0" * 32).read() is None
    (site.folder / "run" / FILE).write_text("{", encoding="utf-8")
    site.lose_everything()
    with pytest.raises(ConfigError, match=FILE):
        site.start()


def test_an_edited_limit_of_an_evaluation_is_told(store: Store, run_name: str) -> None:
    nonce = new_nonce()
    for most in (3, 4):
        tasks = {"math": TaskLimits(), "quiz": TaskLimits(eval_of="math", max_in_flight=most)}
        run = Run.create(store, run_name, nonce, RunLimits(tasks=tasks))
    assert run.changes == ["tasks.quiz.max_in_flight: 3 → 4, from step 1 on"]


def test_a_task_may_start_groups_less_far_ahead_until_it_follows_the_run_again(site: Site) -> None:
    site.start()
    site.set("max_staleness=4", "max_ahead=2")
    assert site.set("tasks.code.max_ahead=0") == {"tasks.code.max_ahead": (None, 0)}
    limits = site.open().limits
    assert (limits.horizon("math"), limits.horizon("code")) == (3, 1)
    assert site.set("tasks.code.max_ahead=config") == {"tasks.code.max_ahead": (0, None)}
    assert site.open().limits.horizon("code") == 3
