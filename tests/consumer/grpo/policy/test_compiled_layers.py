from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from buffer.errors import ConfigError
from consumer.config.learner import LearnerConfig
from consumer.grpo.policy.policy import Policy
from tests.consumer.grpo.models.tiny import build_model
from tests.consumer.handle.test_ranks import build_mixture


def test_a_mixture_of_experts_is_not_compiled(tmp_path: Path) -> None:
    model = build_mixture(tmp_path / "mixture")
    with pytest.raises(ConfigError, match="mixture of experts"):
        Policy(model, LearnerConfig(compile=True))


def test_without_a_compiler_a_learner_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile = true needs .* none of g\+\+"):
        Policy(build_model(tmp_path), LearnerConfig(compile=True))
