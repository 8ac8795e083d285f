"""`rolloutmq run` as a user meets it: to the end, interrupted, killed, and with wrong arguments."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import orjson
import psutil
import pytest

from buffer.redis.keys import Keys
from rolloutmq.run_owner import Stage, read_record
from tests.pipeline.site import Process, Site
from tests.rolloutmq.conftest import in_process

STEPS = 16


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def files_of(folder: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_lost_or_trained_twice_when_a_run_is_stopped_and_each_process_is_killed(
    make_site: Callable[..., Site],
) -> None:
    """Four launchers, one of which comes too early, and an evaluation of the finished run.

    Each process is killed while the run makes two steps, which it then makes all the same. Its
    weights come through Redis; in most other tests they lie in a folder.
    """
    site = make_site(steps=STEPS, held=0)
    change(site, "[policy]", '[policy]\nweights_transport = "redis"')
    stop_in_the_background(site)

    second = site.start("run")
    site.reach(1)
    assert "continues: step" in second.said()
    site.let(1)
    second.child("producer").kill()
    site.until(lambda: "producer restarted" in second.said(), "another producer")
    site.until_held()
    site.let(1)
    children = [each for each in second.children() if each.name() != "valkey-server"]
    second.end(signal.SIGKILL)
    # the launcher cannot signal its children any more: they notice
    site.until(lambda: all_gone(children), "the end of the orphans")

    third = site.start("run")
    site.reach(1)
    for name in ("worker", "train", "server", "worker"):
        site.until_held()
        site.let(2)
        site.kill_server() if name == "server" else third.child(name).kill()
    site.let_go()
    code, output = third.wait(), third.said()
    assert code == 0, output + site.words()
    assert "trainer was killed by SIGKILL" in output
    assert "account: lost 0 · in two stages 0 · trained twice 0" in output
    assert b"trained twice" in (site.run_dir / "report.html").read_bytes()
    assert not (site.run_dir / "weights").exists()
    record = read_record(site.run_dir)
    assert record
    assert record.stage is Stage.FINISHED
    site.check()
    evaluate(site)


def stop_in_the_background(site: Site) -> None:
    where = ("--run-dir", str(site.run_dir))
    judges = ("--set", "tasks.sums.judging.kind=rq", "--set", "launch.judge_workers=2")
    code, output = site.command("run", "--detach", *judges)
    assert code == 0, output
    for words in ("checks   the config", f"rolloutmq stop --run-dir {site.run_dir}"):
        assert words in output
    record = read_record(site.run_dir)
    assert record
    assert (record.stage, record.steps) == (Stage.RUNNING, STEPS)
    code, output = site.command("run")
    assert code == 5
    assert "another `rolloutmq run` is running in" in output
    step = site.reach(3)
    assert "2 judge workers" in (site.run_dir / "logs" / "judge.log").read_text(encoding="utf-8")
    assert "trainer" in in_process("logs", "trainer", "-n", "5", *where).stdout
    done = in_process("stop", *where)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert "lost 0 · in two stages 0" in printed
    assert not site.server.is_running
    assert site.history().steps[-1].step == step
    assert f"at step {step} of {STEPS}" in printed  # what was trained is in the checkpoint


def evaluate(site: Site) -> None:
    """Evaluate a model folder. That a checkpoint becomes one is tested elsewhere."""
    before = files_of(site.run_dir)
    words = (str(site.model), "--set", "tasks.held.eval_of=sums", "--json")
    code, output = site.command("eval", *words)
    assert code == 0, output
    found = orjson.loads(output[output.index("{\n") :])
    assert (found["model"], found["step"]) == (str(site.model), None)
    assert found["tasks"]["held"]["eval/groups"] == 40
    assert files_of(site.run_dir) == before
    assert not (site.folder / "run-eval").exists()


@pytest.mark.slow
def test_run_trains_a_warm_started_model_with_a_real_engine(tmp_path: Path) -> None:
    """Run with everything real: generated problems, a new model, weights, an evaluation.

    The same with vLLM: tests/rolloutmq/launch/test_gpu_check.py.
    """
    folder = tmp_path / "site"
    site = Site(folder, folder / "none", name="real", steps=3)
    site.config.write_text(
        f"""
[run]
name = "real"
dir = "{site.run_dir}"
[plan]
steps = 3
batch_size = 4
[policy]
max_staleness = 1
[tasks.sums]
prompt_repeat_k = 4
judge = "reasoning_gym"
sample = {{ max_tokens = 4 }}
[tasks.sums.dataset]
kind = "reasoning_gym"
name = "chain_sum"
size = 400
warm_start_size = 300
held_out_size = 40
config = {{ min_terms = 3, max_terms = 3, min_digits = 1, max_digits = 1 }}
[tasks.held_out]
eval_of = "sums"
[engine]
kind = "transformers"
device = "cpu"
[launch]
workers = 1
[learner]
learning_rate = 1e-3
[tiny_model]
hidden = 64
[warm_start]
max_steps = 60
development_problems = 50
stop_accuracy = 0.2
""",
        encoding="utf-8",
    )
    try:
        code, output = site.command("run")
        assert code == 0, output + site.words()
        assert "account: lost 0 · in two stages 0 · trained twice 0" in output
        assert "held_out" in output
        assert (site.run_dir / "report.html").stat().st_size > 10_000
        assert [step.step for step in site.history().steps] == [1, 2, 3]
        worker = (site.run_dir / "logs" / "worker-0.log").read_text(encoding="utf-8")
        assert worker.count("weights loaded") >= 2
        assert "Traceback" not in worker
    finally:
        site.close()


# -- bad input ---------------------------------------------------------------


def refused(site: Site, verb: str, *more: str) -> tuple[int, str]:
    """Return the exit code and the output of a command that ends before it starts a process."""
    done = in_process(verb, str(site.config), *more, COLUMNS="200")
    return done.returncode, done.stdout + done.stderr


def change(site: Site, old: str, new: str) -> None:
    text = site.config.read_text(encoding="utf-8")
    assert old in text
    site.config.write_text(text.replace(old, new), encoding="utf-8")


def test_a_line_that_is_not_json_is_reported_with_file_and_number(
    make_site: Callable[..., Site],
) -> None:
    site = make_site()
    file = site.folder / "problems.jsonl"
    file.write_bytes(file.read_bytes() + b"\n{not json}\n")
    code, output = refused(site, "run")
    assert code == 2
    assert f"{file}:41: " in output


def waits(process: Process) -> bool:
    return "waiting until it is created" in process.said()


def test_a_signal_ends_a_process_that_still_waits_for_its_run(
    make_site: Callable[..., Site],
) -> None:
    site = make_site()
    site.server.start()
    for verb in ("producer", "worker"):
        process = site.start(verb)
        site.until(partial(waits, process), "its wait")
        assert process.end(signal.SIGTERM) in (130, -signal.SIGTERM)


# -- regenerated run ------------------------------


def lose(site: Site, seed: int) -> None:
    """Half of the keys of the run are gone, its settings among them."""
    chance = random.Random(seed)
    server = site.server
    server.start()
    with server.connect() as raw:
        keys = sorted(raw.scan_iter(f"{Keys(site.name).prefix}*"))
        gone = [key for key in keys if chance.random() < 0.5]
        raw.delete(*gone, Keys(site.name).meta, Keys(site.name).control)
        raw.set("rmq:{another}:meta", "theirs")
    server.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_half_evicted_run_is_made_again_once_and_ends_with_a_clean_account(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(steps=10, held=0)
    first = site.start("run")
    reached = site.reach(5)
    assert first.end(signal.SIGTERM) == 130
    lose(site, seed=3)
    code, output = site.command("run")
    assert code == 5, output
    assert "--regenerate" in output

    second = site.start("run", "--regenerate")
    site.reach(2)
    assert f"from the checkpoint of step {reached}" in second.said()
    site.let_go()
    second.child("train").kill()
    assert second.wait() == 0, site.words()
    assert "trainer restarted" in second.said()
    # a trainer that is started again clears nothing
    assert second.said().count("Cleared") == 1
    log = (site.run_dir / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert "Cleared" not in log
    site.check()
    site.server.start()
    with site.server.connect() as raw:
        assert raw.get("rmq:{another}:meta") == b"theirs"
    site.server.stop()


# -- a live run, and others that want something of it ------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Site]:
    """Disturb a run, which must make progress at the end."""
    site = Site(tmp_path_factory.mktemp("live"), tiny_model, name="live", steps=100_000, held=0)
    site.server.start()
    site.start("train")
    site.start("producer")
    site.start("worker", "--id", "w0")
    site.reach(2)
    yield site
    site.reach(2)
    audit = site.audit()
    assert audit.clean, (audit.faults, audit.lost, audit.doubled)
    assert not site.history().trained_twice()
    site.close()


def test_a_second_trainer_is_refused_unless_it_takes_over(live: Site) -> None:
    code, output = live.command("train")
    assert code == 5
    assert "has a trainer that was alive" in output
    assert "--take-over" in output
    first = live.processes[0]
    second = live.start("train", "--take-over")
    assert first.wait() == 5
    assert "another one was opened" in first.said()
    live.reach(2)
    assert second.exit_code is None


def test_a_run_of_the_same_name_from_another_folder_is_refused(
    live: Site, make_site: Callable[..., Site]
) -> None:
    other = make_site(name="live")
    code, output = refused(other, "run", "--redis-url", live.server.url)
    assert code == 5
    assert "another run named 'live'" in output
    assert "choose another [run] name" in output


def test_another_data_set_ends_the_producer_and_leaves_the_run_intact(
    live: Site, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(b'{"question": "1 + 1", "answer": 2}\n')
    code, output = live.command(
        "producer", "--take-over", "--set", f"tasks.sums.dataset.path={other}"
    )
    assert code == 2
    assert "[tasks.sums.dataset] is not the data set that the run draws from" in output
