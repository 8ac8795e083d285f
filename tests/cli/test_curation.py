"""`export` and `import` from the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from buffer.embedded import EmbeddedServer
from tests.cli.conftest import Command, json_of
from tests.cli.populate import Scene


def test_export_choose_and_import(scene: Scene, command: Command, tmp_path: Path) -> None:
    done = command("export", str(tmp_path / "all.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "2 groups with 4 rollouts written" in done.stdout
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "chosen.jsonl").write_bytes(b"".join(lines[:2]))
    done = command("import", str(tmp_path / "chosen.jsonl"))
    assert done.stdout.startswith("1 group with 2 rollouts imported")
    facts = json_of(command("fsck", "--json"))
    assert facts["clean"]
    assert facts["checked"] == 13
    assert facts["tasks"]["math"]["imported"] == 1
    assert "imported" in command("fsck").stdout
    assert "imported" in command("status").stdout
    assert json_of(command("show", "math-0033554432", "--json"))["places"] == ["pool"]
    done = command("show", "math-0033554433")
    assert (done.returncode, "was not imported" in done.stderr) == (2, True)


def test_import_asks_the_function_of_the_run(
    scene: Scene, command: Command, server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_policy_of_import.py").write_text("def longest_first(group):\n    return -group.longest\n")
    keys, client = scene.run.keys, cast(Any, scene.run.store.control)
    client.hset(keys.meta, "order", '"my_policy_of_import:longest_first"')
    least = {"task": "math", "logprobs": [0.0] * 3, "response_ids": [1, 2, 3], "reward": {"score": 1}}
    (tmp_path / "f.jsonl").write_bytes(orjson.dumps({"gid": "a"} | least))
    done = command("import", str(tmp_path / "f.jsonl"))
    assert (done.returncode, "my_policy_of_import" in done.stderr) == (2, True)
    assert client.zcard(keys.order("math")) == 0
    done = command("import", str(tmp_path / "f.jsonl"), "--run-dir", str(server.folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [score for _, score in client.zrange(keys.order("math"), 0, -1, withscores=True)] == [-3.0]


def test_json_of_both(scene: Scene, command: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "f.jsonl")
    assert json_of(command("export", path, "--json")) == {"file": path, "groups": 2, "rollouts": 4}
    assert json_of(command("import", path, "--task", "math", "--json")) == {"file": path, "groups": 2, "rollouts": 4}


def test_mistakes_are_one_clear_error(scene: Scene, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    for options, words in (
        (("export", str(path), "--status", "done"), "no status 'done'"),
        (("export", str(path), "--task", "chess"), "no task 'chess'"),
        (("import", str(path)), "cannot be read"),
    ):
        done = command(*options)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    path.write_bytes(orjson.dumps({"gid": "a"}))
    done = command("import", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "f.jsonl, line 1: response_ids: Field required" in done.stderr
