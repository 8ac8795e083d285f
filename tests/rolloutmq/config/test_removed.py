from __future__ import annotations

import subprocess
import sys

import pytest

from buffer.config.removed import COMMANDS, SETTINGS
from buffer.errors import ConfigError
from rolloutmq.config.load import validate_config


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_removed_setting_is_refused_with_what_to_use_instead(setting: str) -> None:
    key, _, value = setting.partition(" = ")
    tree: dict[str, object] = {"run": {"name": "old"}, "tasks": {}}
    node = tree
    *sections, last = key.replace("*", "math").split(".")
    for section in sections:
        node = node.setdefault(section, {})  # type: ignore[assignment]
    node[last] = value.strip('"') or "anything"
    with pytest.raises(ConfigError) as error:
        validate_config(tree, "old.toml")
    assert f"{key.replace('*', 'math')}: {SETTINGS[setting]}" in error.value.message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_removed_command_is_refused_with_what_to_use_instead(command: str) -> None:
    call = [sys.executable, "-m", "rolloutmq", *command.split()]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert COMMANDS[command] in " ".join(done.stderr.split())
