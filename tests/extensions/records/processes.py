"""Processes that are forked from a warm one: ranks that train, and `rolloutmq` commands.

usage: python -m tests.extensions.records.processes two_ranks FOLDER MODEL
       python -m tests.extensions.records.processes killed RUNS DEATHS COMMAND…
       python -m tests.extensions.records.processes bundle FOLDER FILE
       python -m tests.extensions.records.processes live FOLDER MODEL

`two_ranks` trains a run on two ranks, then runs commands on it on one and two. `killed` runs a
command with `--name whole`, then with `--name killed`: it dies at each of DEATHS, such as
"steps.jsonl:2", the second operation on a path below its folder that has these words, and the last
life comes to its end. `bundle` does this with a replay of a bundle, whose files are in FOLDER. All
print what the commands printed, and how they ended, as JSON. `live` trains a run of 8 steps, and waits for a file FOLDER/go behind the fourth.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import orjson
import torch

from buffer.redis.server.embedded import EmbeddedServer
from consumer.grpo.trainer import Trainer
from consumer.handle.ranks import join
from rolloutmq.cli import main as rolloutmq
from rolloutmq.extensions.records import bundle, fork, replay, rescore
from rolloutmq.launch.child import rank_environments
from tests.consumer.handle.many_lives import fork as forked
from tests.consumer.handle.many_lives import wait_for, wait_for_all
from tests.extensions.records.small_run import small_config, train_run

WARM = (Trainer, bundle, fork, replay, rescore)
"""What a command would import."""

JUDGE = "tests.extensions.records.other_judge:reversed_score"
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.rmdir", "shutil.rmtree")


def call(
    args: Sequence[str], out: Path, variables: Mapping[str, str], death: str = "", folder: str = ""
) -> NoReturn:
    """Be a `rolloutmq` command; its output goes to `out`."""
    os.environ.update(variables)
    sys.argv = ["rolloutmq", *args]
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    if death:
        die_at(death, folder)
    try:
        rolloutmq()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    os._exit(0)


def die_at(death: str, folder: str) -> None:
    words, _, number = death.rpartition(":")
    left = int(number)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        paths = [str(arg) for arg in args[:2]] if event in EVENTS else []
        if any(folder in path and words in path for path in paths):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def on_ranks(count: int, folder: Path, *args: str) -> dict[str, Any]:
    """Run a command on several ranks; return its document and the exit code of rank 0."""
    outs = [folder / f"out-{rank}" for rank in range(count)]
    ranks = [
        forked(partial(call, [*args, "--json"], out, variables))
        for out, variables in zip(outs, rank_environments(count), strict=True)
    ]
    codes = wait_for_all(ranks)
    assert all(not out.read_bytes() for out in outs[1:])
    return {"code": codes[0], **orjson.loads(outs[0].read_bytes() or b"{}")}


def two_ranks(folder: Path, model: Path) -> dict[str, Any]:
    config = small_config(folder / "runs" / "first", model)
    run = str(config.run.folder)

    def train(url: str, variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        train_run(url, config, model, join())

    with EmbeddedServer(config.run.folder / "server") as server:
        codes = wait_for_all(
            [forked(partial(train, server.url, found)) for found in rank_environments(2)]
        )
    assert codes == [0, 0], codes
    file = str(folder / "runs" / "step5.rmq")
    assert on_ranks(1, folder, "bundle", file, "--step", "5", "--run-dir", run)["code"] == 0
    judged = ("--task", "math", "--judge", JUDGE, "--from", "2", "--yes")
    return {
        "two": on_ranks(2, folder, "replay", run, "--name", "two"),
        "part": on_ranks(2, folder, "replay", run, "--name", "part", "--from", "3"),
        "one": on_ranks(1, folder, "replay", run, "--name", "one"),
        "bundle": on_ranks(2, folder, "replay", file),
        "rescored": on_ranks(2, folder, "rescore", run, "--name", "rescored", *judged),
        "again": on_ranks(2, folder, "rescore", run, "--name", "again", *judged),
    }


def killed(runs: Path, deaths: Sequence[str], args: Sequence[str]) -> dict[str, Any]:
    out = runs / "out"
    codes = [wait_for(forked(partial(call, [*args, "--name", "whole", "--json"], out, {})))]
    whole = orjson.loads(out.read_bytes())
    for death in [*deaths, ""]:
        life = partial(
            call, [*args, "--name", "killed", "--json"], out, {}, death, str(runs / "killed")
        )
        codes.append(wait_for(forked(life)))
    return {"codes": codes, "whole": whole, "killed": orjson.loads(out.read_bytes())}


def killed_bundle(folder: Path, file: str) -> dict[str, Any]:
    tempfile.tempdir = str(folder)
    lives = [
        partial(call, ["replay", file, "--json"], folder / "out", {}, death, str(folder))
        for death in ("replayed/steps.jsonl:1", "")
    ]
    codes = [wait_for(forked(life)) for life in lives]
    return {"codes": codes, **orjson.loads((folder / "out").read_bytes())}


def live(folder: Path, model: Path) -> None:
    config = small_config(folder / "first", model, plan={"steps": 8})
    with EmbeddedServer(config.run.folder / "server") as server:
        train_run(server.url, config, model, pause=(4, folder / "go"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    scene, place, *rest = sys.argv[1:]
    if scene == "live":
        live(Path(place), Path(rest[0]))
    elif scene == "two_ranks":
        sys.stdout.write(orjson.dumps(two_ranks(Path(place), Path(rest[0]))).decode())
    else:
        found = (
            killed_bundle(Path(place), rest[0])
            if scene == "bundle"
            else killed(Path(place), rest[0].split(","), rest[1:])
        )
        sys.stdout.write(orjson.dumps(found).decode())
