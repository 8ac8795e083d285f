from __future__ import annotations

from pathlib import Path

import pytest

from buffer.errors import DatasetError
from producer_workers.config.dataset import LARGEST_ROW
from producer_workers.datasets.open import open_dataset
from rolloutmq.extensions.environments.datasets import HarborSection


def write(folder: Path, **files: str) -> None:
    """Write a task; `toml` is its task.toml, and `instruction` its instruction.md."""
    names = {"toml": "task.toml", "instruction": "instruction.md"}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / names[name]).write_text(text, encoding="utf-8")


def test_tasks_are_rows_in_the_order_of_their_names(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write(tasks / "b", toml="", instruction="# Fix é\nIt fails.\n")
    write(tasks / "a", toml="[agent]\ntimeout_sec = 5.0", instruction="Build it.")
    write(tasks / "c", toml='[[steps]]\nname = "one"\n[[steps]]\nname = "two"')
    write(tasks / "c" / "steps" / "one", instruction="First.")
    (tasks / ".git").mkdir()
    (tasks / "README.md").touch()
    rows = open_dataset(HarborSection(kind="harbor", path=tasks), tmp_path)
    assert [rows.row(n).messages[0]["content"] for n in range(len(rows))] == [
        "Build it.",
        "# Fix é\nIt fails.\n",
        "First.",
    ]
    assert rows.row(0).extra == {"task_path": str(tasks / "a")}
    with pytest.raises(IndexError):
        rows.row(3)


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({}, "tasks"),
        ({"instruction": "Do it."}, "t/task.toml"),
        ({"toml": ""}, "t/instruction.md"),
        ({"toml": "", "instruction": " \n"}, "t/instruction.md"),
        ({"toml": "[agent", "instruction": "Do it."}, "t/task.toml"),
        ({"toml": "steps = 3"}, "t/task.toml"),
        ({"toml": '[[steps]]\nname = "one"'}, "t/steps/one/instruction.md"),
    ],
)
def test_a_task_that_cannot_be_read_is_named_with_its_file(
    tmp_path: Path, files: dict[str, str], place: str
) -> None:
    write(tmp_path / "tasks" / "good", **({"toml": "", "instruction": "x"} if files else {}))
    write(tmp_path / "tasks" / "t", **files)
    with pytest.raises(DatasetError) as caught:
        open_dataset(HarborSection(kind="harbor", path=tmp_path / "tasks"), tmp_path)
    assert str(tmp_path / "tasks" / place if files else tmp_path / place) in caught.value.message


def test_an_instruction_of_harbor_over_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "task.toml").touch()
    with (tmp_path / "one" / "instruction.md").open("wb") as file:
        file.truncate(LARGEST_ROW + 1)
    with pytest.raises(DatasetError, match=r"one/instruction\.md: has more than"):
        open_dataset(HarborSection(kind="harbor", path=tmp_path), tmp_path)


def test_hidden_folders_and_dangling_links_are_no_tasks_of_harbor(tmp_path: Path) -> None:
    for name in ("task", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instruction.md").write_text("do it")
    (tmp_path / "task" / "task.toml").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert len(open_dataset(HarborSection(kind="harbor", path=tmp_path), tmp_path)) == 1
