"""[learner] compile: the numbers of the model's own layers, on one rank and on several."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from buffer.config.sections.learner import LearnerConfig
from buffer.errors import ConfigError
from consumer.learner.learner import Learner
from tests.consumer.learner.sharded_learner import Life
from tests.consumer.learner.test_sharded_learner import Lives, build_mixture
from tests.consumer.models.tiny import build_model

no_compiler = shutil.which("g++") is None


@pytest.mark.slow
@pytest.mark.skipif(no_compiler, reason="needs g++")
def test_compiled_layers_train_as_others_do_on_one_rank_and_on_several(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    options = {"compile": True}
    lives = Lives(
        tmp_path,
        Life(name="plain", model=model),
        Life(name="compiled", model=model, options=options),
        Life(name="two", model=model, ranks=2, options=options),
    )
    for name in ("compiled", "two"):
        lives.assert_same(name, "plain")


def test_a_mixture_of_experts_is_not_compiled(tmp_path: Path) -> None:
    model = build_mixture(tmp_path / "mixture")
    with pytest.raises(ConfigError, match="mixture of experts"):
        Learner(model, LearnerConfig(compile=True))


def test_without_a_compiler_a_learner_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile = true needs .* none of g\+\+"):
        Learner(build_model(tmp_path), LearnerConfig(compile=True))
