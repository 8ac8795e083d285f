from __future__ import annotations

import re
from pathlib import Path

import pytest

import rolloutmq
from tests.programs import ROOT

PUBLIC = """
    AgentLoop AgentLoopManager Answer AsyncRolloutConsumer AttachedJudge Batch BatchDataset CheckpointFolder
    Column ColumnJudge ConfigError Dataset EmbeddedServer Engine Environment FolderSender Judge Manifest
    MediaRef Mode MultiTurnAgentLoop NamedJudge NotReady Observer PolicyVersion Position RehearsalError ReplayBuffer
    RolloutConsumer RolloutGroup RolloutMQError RolloutState Run RunLimits SampleParams Section
    ShardedConsumer SingleTurnAgentLoop Status Store TaskLimits ToolCall VersionSpan Worker
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
