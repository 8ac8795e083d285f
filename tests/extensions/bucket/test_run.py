from __future__ import annotations

from collections.abc import Callable

import pytest

from rolloutmq.extensions.bucket import Bucket
from tests.pipeline.site import Site

STEPS = 6


@pytest.mark.slow
def test_a_run_is_trained_with_weights_of_a_bucket_also_after_its_trainer_was_killed(
    make_site: Callable[..., Site], url: str
) -> None:
    site = make_site(steps=STEPS, held=0)
    text = site.config.read_text(encoding="utf-8")
    site.config.write_text(f'[weights]\nurl = "{url}"\n{text}', encoding="utf-8")
    run = site.start("run")
    site.reach(2)
    site.until_held()
    site.let(2)
    run.child("train").kill()
    site.until_held()
    site.let_go()
    assert run.wait() == 0, run.said() + site.words()
    site.check()
    assert not (site.run_dir / "weights").exists()
    bucket = Bucket(f"{url}/{site.name}")
    assert all(bucket.find(name) for name in bucket.names())
    assert 1 <= len(bucket.names()) <= 3
    words = site.words()
    assert "secret-of-the-test" not in words
