from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutmq.web.access import token_of
from tests.pipeline.site import Site
from tests.rolloutmq.conftest import in_process

COMMANDS = (
    "server {where}", "report {run} -o {made}/report.html", "save {made}/saved {where}",
    "export {made}/groups.jsonl {where}", "server --stop {where}",
)  # fmt: skip

KINDS = {
    "server", "logs", "samples", "steps.jsonl", "checkpoints", "weights", "run.json", "web.token",
}  # fmt: skip


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the mode of all below a folder, and of itself; what goes meanwhile is left out."""
    found = {}
    # unlike a glob, a walk leaves out a folder that goes
    tree = os.walk(folder)
    inside = (Path(place, name) for place, dirs, files in tree for name in [*dirs, *files])
    for path in [folder, *inside]:
        try:
            facts = path.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISLNK(facts.st_mode):
            found[str(path.relative_to(folder.parent))] = stat.S_IMODE(facts.st_mode)
    return found


def wrong(found: dict[str, int], mask: int) -> dict[str, str]:
    return {name: oct(mode) for name, mode in found.items() if mode & mask}


@pytest.mark.slow
@pytest.mark.parametrize(("users", "runs"), [(0o000, ""), (0o000, "0027")], ids=["000", "group"])
def test_nobody_else_can_open_a_file_of_a_run(
    make_site: Callable[..., Site], users: int, runs: str
) -> None:
    site = make_site(steps=4, held=2)
    made = site.folder / "made"
    made.mkdir()
    site.run_dir.mkdir(mode=0o755)  # as an earlier version left it
    more = ["--set", f"run.umask={runs}"] if runs else []
    more += [
        "--set",
        "run.columns=" + str(site.run_dir / "columns"),
        "--set",
        "trainer.keep_weights=2",
    ]
    mask = int(runs or "0077", 8)
    with umask(users):
        run = site.start_module("rolloutmq", "run", str(site.config), *more)
        site.until_held()
        during = modes(site.run_dir)
        site.let_go()
        while run.exit_code is None:
            found = modes(site.run_dir)
            assert wrong(found, mask) == {}
            during |= found
        assert run.wait() == 0, run.said()
        token_of(site.run_dir)
        for words in COMMANDS:
            filled = words.format(where=f"--run-dir {site.run_dir}", run=site.run_dir, made=made)
            done = in_process(*filled.split())
            assert done.returncode == 0, done.stderr
    ended = modes(site.run_dir)
    kinds = {name.split("/")[1] for name in during | ended if "/" in name}
    assert kinds >= KINDS
    assert wrong(during, mask) == {}
    assert wrong(ended, mask) == {}
    written = modes(made)
    assert {"made/report.html", "made/saved", "made/groups.jsonl"} <= set(written)
    written.pop("made")  # it is the test's
    assert wrong(written, 0o077) == {}
    if runs:
        # the group may read what it is meant to read, also what was copied or renamed
        shared = {
            name: oct(mode)
            for name, mode in (during | ended).items()
            if ".tmp" not in name
            and name.split("/")[1:2] in (["weights"], ["checkpoints"], ["samples"], ["steps.jsonl"])
            and not mode & 0o040
        }
        assert shared == {}
