from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rolloutmq
from tests.programs import ROOT, run

THEIRS = "OWNER = 'the user'\n\n\ndef score(*, response, ground_truth, state):\n    return 1.0\n"
CONFIG = Path(__file__).with_name("import_names.toml").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "buffer").mkdir()
    for file in ("consumer.py", "buffer/__init__.py"):
        (tmp_path / file).write_text(THEIRS, encoding="utf-8")
    rows = "def rows():\n    return [{'question': '1 + 1', 'answer': '2'}]\n"
    (tmp_path / "configs.py").write_text(THEIRS + rows, encoding="utf-8")
    return tmp_path


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, *args, cwd=folder, PYTHONPATH=str(ROOT))


def run_script(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(code, encoding="utf-8")
    return python(folder, "script.py")


def test_the_command_starts_beside_them(folder: Path) -> None:
    done = python(folder, "-c", "from rolloutmq.cli import main; main()", "--help")
    assert "Exit codes" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_config_finds_a_module_of_the_users_folder(folder: Path) -> None:
    (folder / "run.toml").write_text(CONFIG.format(judge="configs:score"), encoding="utf-8")
    done = python(folder, "-m", "rolloutmq.check", "data", "all", "0", "run.toml")
    assert "task sums: 1 rows" in done.stdout, done.stderr


def test_the_users_folder_is_searched_last(folder: Path) -> None:
    code = "from buffer.imports import load_object\n"
    done = python(folder, "-P", "-c", code + "load_object('consumer:score', kind='judge')")
    assert "module 'consumer' has no 'score'" in done.stderr
    assert str(ROOT / "consumer" / "__init__.py") in done.stderr
    found = python(folder, "-P", "-c", code + "print(load_object('configs:OWNER', kind='judge'))")
    assert found.stdout == "the user\n"


@pytest.mark.slow
def test_a_script_beside_them_imports_rolloutmq(folder: Path) -> None:
    done = run_script(folder, "from rolloutmq import BatchDataset, Run\nimport configs\n"
                      "print(BatchDataset.__module__, configs.OWNER)")  # fmt: skip
    assert done.stdout == "consumer.handle.torch_dataset the user\n", done.stderr


def test_a_script_that_has_imported_one_of_them_is_told_which_file_to_rename(folder: Path) -> None:
    done = run_script(folder, "import consumer\nimport rolloutmq")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {folder / 'consumer.py'} was imported as 'consumer', which is the name of a "
        "package of rolloutmq: rename that file"
    )


PUBLIC = """
    AgentLoop AgentLoopManager Answer AsyncRolloutConsumer AttachedJudge Batch BatchDataset CheckpointFolder
    CheckpointedConsumer Column ColumnJudge ConfigError Dataset EmbeddedServer Engine Environment FolderSender Judge Manifest
    MediaRef Mode MultiTurnAgentLoop NamedJudge NotReady Observer PolicyVersion Position RehearsalError ReplayBuffer
    RolloutConsumer RolloutGroup RolloutMQError RolloutState Run RunLimits SampleParams Section
    ShadowConsumer ShardedConsumer SingleTurnAgentLoop Skip Status Store TaskLimits ToolCall VersionSpan Worker
    padded_tensors publish rehearse run_all runs_inline
"""
NAMES = PUBLIC.split()
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md"), *ROOT.glob("docs/pages/*.md")]
    # code of the project itself stands in CONTRIBUTING
    if not path.is_relative_to(ROOT / "tests") and path.name != "CONTRIBUTING.md"
)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(rolloutmq, name).__name__ == {"AgentLoopManager": "Producer"}.get(name, name)


@pytest.mark.parametrize("name", ["Nothing"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match="module 'rolloutmq' has no attribute 'Nothing'"):
        getattr(rolloutmq, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docs_import_public_names_only(page: Path) -> None:
    for code in re.findall(r"^```python.*?\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        assert not re.search(
            r"^\s*(?:from|import) (?:buffer|consumer|producer_workers)\b", code, re.M
        )
        for names in re.findall(r"^from rolloutmq import (.+)$", code, re.M):
            assert set(names.split(", ")) <= set(NAMES)
        assert not re.search(r"^\s*(?:from|import) rolloutmq\.", code, re.M)
