"""`rolloutmq audit`: compute logprobs of some groups of each batch again."""

from __future__ import annotations

import signal
import threading

import typer

from buffer.redis.server.process import log_json
from rolloutmq.options import ConfigPath, ConfigUrl, Overrides
from rolloutmq.presets import open_config


def register(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command(epilog="Example: rolloutmq audit configs/demo.toml --set audit.share=0.05")(audit)


def audit(config: ConfigPath, overrides: Overrides = None, redis_url: ConfigUrl = None) -> None:
    """Compute logprobs of some groups of each batch again, and bar workers that differ.

    Start it on a machine that you trust, with the trainer's user of the server and with the
    weights that the trainer publishes. It loads the model as the trainer does ([trainer] device,
    [learner]), chooses [audit] share of the groups of each batch after it was taken, and bars a
    worker whose logprobs differ by more than [audit] tolerance from those of the weights that its
    tokens name. `rolloutmq workers` shows the counts, `rolloutmq workers --groups WORKER` what the
    trainer has used of a worker. SIGTERM ends it between two batches.
    """
    from buffer.config.config import TrainingConfig
    from buffer.config.sources import fetch
    from buffer.open_run import open_store, server_url, wait_for_run
    from consumer.grpo.audit.auditor import Auditor

    settings = fetch(open_config(TrainingConfig, config, overrides))
    log_json("audit", settings.run.name)
    url = server_url(settings, redis_url)
    store = open_store(settings, url, name="rolloutmq-audit", patient=True)
    run = wait_for_run(store, settings.run.name)
    run.check_signatures(settings.trainer.keys_file)
    auditor = Auditor(run, settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    auditor.serve(stop)
