from __future__ import annotations

import sys
from pathlib import Path

import pytest

import consumer
from buffer.errors import ConfigError
from buffer.imports import load_object


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        ("import nowhere_at_all", "No module named 'nowhere_at_all'", ""),
        ("def f(:", "SyntaxError: invalid syntax", "line 1"),
        ("x = 1\n\n{}['solution']", "KeyError: 'solution'", "line 3"),
        ("import sys\nsys.exit()", "SystemExit", "line 2"),
        ("raise StopIteration", "StopIteration", "line 1"),
        ("x = 1", "has no 'score'", ""),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str, line: str
) -> None:
    module = f"broken_{abs(hash(code))}"
    (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_object(f"{module}:score", kind="judge")
    assert f"judge '{module}:score'" in caught.value.message
    assert words in caught.value.message
    assert line in caught.value.hint
    assert caught.value.hint


def test_a_module_without_a_file_has_no_such_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder_of_judges"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for module, origin in (("sys", "built in"), (folder.name, str(folder))):
        with pytest.raises(ConfigError, match=f"'{module}' has no 'score'") as caught:
            load_object(f"{module}:score", kind="judge")
        assert caught.value.hint == f"the module is {origin}"


@pytest.mark.parametrize("spec", ["consumer:score", "consumer.mine:score"])
def test_a_module_that_another_one_hides_is_named_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    mine = tmp_path / "consumer.py"
    mine.write_text("def score(): ...", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ConfigError) as caught:
        load_object(spec, kind="judge")
    assert str(mine) in caught.value.hint
    assert str(Path(consumer.__file__)) in caught.value.hint
