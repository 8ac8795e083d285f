"""Repositories of the Hub: what is downloaded, and what a user sees who has no network, no access,
or made a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from buffer.errors import HubError
from producer_workers.hub import Repository, repository
from tests.fake_hub import FakeHub, fake_hub

MODEL = "Qwen/Qwen3-tiny"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"a model"}
OTHERS = {"onnx/config.json": b"", "pytorch_model.bin": b"", "consolidated.safetensors": b""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as found:
        found.use(monkeypatch, tmp_path)
        yield found


def refusal(wanted: Repository) -> tuple[str, str]:
    with pytest.raises(HubError) as caught:
        wanted.download()
    assert "\n" not in str(caught.value)
    return caught.value.message, caught.value.hint


def test_a_model_is_downloaded_once_without_the_copies_in_other_formats(hub: FakeHub) -> None:
    commit = hub.push(MODEL, FILES | OTHERS, "v1")
    for revision in (None, "main", "v1", commit):
        folder = Repository(MODEL, "model", revision).download()
        assert folder.name == commit
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        assert Repository(MODEL, "model", revision).folder() == folder
    assert [path for path in hub.asked if path.endswith("bin")] == []
    hub.asked.clear()
    Repository(MODEL, "model", commit).download()
    assert hub.asked == []


def test_a_commit_stays_available_when_main_moves_and_the_network_goes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hub.push(MODEL, FILES)
    Repository(MODEL, "model").download()
    new = hub.push(MODEL, FILES | {"model.safetensors": b"others"})
    assert Repository(MODEL, "model", old).download().name == old
    assert Repository(MODEL, "model").download().name == new
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert Repository(MODEL, "model").download().name == new
    assert Repository(MODEL, "model", old).download().name == old


@pytest.mark.parametrize("is_set", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_without_a_network_the_error_has_the_command_that_downloads(
    is_set: bool, kind: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_set)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    is_model = kind == "model"
    message, hint = refusal(Repository("a/b", "model" if is_model else "dataset", "v2"))
    assert ("HF_HUB_OFFLINE is set" if is_set else "127.0.0.1:9 is not reachable") in message
    assert "no folder a/b here" in message
    option = "" if is_model else " --repo-type dataset"
    assert f"`hf download a/b{option} --revision v2`" in hint
    assert f"copy {kind}s--a--b from its cache to {tmp_path / 'hub'}" in hint


def test_a_download_that_was_cut_off_is_not_taken_for_the_model(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(MODEL, FILES)
    folder = Repository(MODEL, "model").download()
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message, hint = refusal(Repository(MODEL, "model"))
    assert "lacks files" in message
    assert "hf download" in hint


def test_what_cannot_be_had_is_named(hub: FakeHub) -> None:
    hub.push(MODEL, FILES)
    hub.gated.add("meta/secret")
    message, hint = refusal(Repository("meta/secret", "model"))
    assert "gated" in message
    assert "hf auth login" in hint
    assert f"{hub.url}/meta/secret" in hint
    message, hint = refusal(Repository("models/Qwen3", "model"))
    assert message.startswith("there is no folder models/Qwen3 here, and no model models/Qwen3 on")
    message, _ = refusal(Repository(MODEL, "model", "v9"))
    assert message == f"model {MODEL} has no revision v9"


@pytest.mark.parametrize(
    ("path", "revision", "is_repository"),
    [
        ("Qwen/Qwen3-0.6B", None, True), ("here/model", None, False), ("here/model", "main", True),
        ("/models/Qwen3", None, False), ("../a/b", None, False), ("models/a/b", None, False),
        ("model", None, False),
    ],
)  # fmt: skip
def test_a_folder_that_exists_is_no_repository_unless_a_revision_is_given(
    path: str,
    revision: str | None,
    is_repository: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert (repository(Path(path), revision, "model") is not None) == is_repository
