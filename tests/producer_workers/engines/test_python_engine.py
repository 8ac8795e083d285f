from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from buffer.errors import ConfigError
from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import EngineConfig, PythonConfig
from producer_workers.engines import build_engine

FIRST = PolicyVersion("main", 0)


class Mine:
    def __init__(self, config: PythonConfig, model_dir: Path, version: PolicyVersion) -> None:
        self.made_of = (config.options["word"], model_dir, version)


def test_a_config_names_an_engine_of_the_users(tmp_path: Path) -> None:
    section = {"kind": "python", "factory": f"{__name__}:Mine", "options": {"word": "hello"}}
    parsed: Any = TypeAdapter[Any](EngineConfig).validate_python(section)
    engine: Any = build_engine(parsed, tmp_path, FIRST)
    assert engine.made_of == ("hello", tmp_path, FIRST)
    missing = parsed.model_copy(update={"factory": f"{__name__}:Yours"})
    with pytest.raises(ConfigError, match="Yours"):
        build_engine(missing, tmp_path, FIRST)
