"""`export` and `import` from the command line."""

from __future__ import annotations

from pathlib import Path

import orjson

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
