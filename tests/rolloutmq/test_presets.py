from __future__ import annotations

import re
from pathlib import Path

import pytest

from buffer.errors import ConfigError
from rolloutmq.presets import find_config, preset_names, presets_folder
from tests.rolloutmq.conftest import in_process


def test_a_file_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo = presets_folder() / "demo.toml"
    for name in ("demo", "demo.toml", "configs/demo.toml", "configs/demo"):
        assert find_config(Path(name)) == demo
    Path("demo.toml").touch()
    assert find_config(Path("demo.toml")) == Path("demo.toml")
    assert find_config(Path("demo")) == demo
    with pytest.raises(ConfigError):
        find_config(Path("other/demo.toml"))


def test_an_unknown_name_is_answered_with_the_presets(tmp_path: Path) -> None:
    done = in_process("run", "qwen3_600b", cwd=tmp_path)
    assert done.returncode == 2
    assert "qwen3_600b: there is no such file, and no preset of that name" in done.stderr
    listed = re.findall(r"[\w.]+", done.stderr.partition("one of ")[2])
    assert listed == preset_names()
