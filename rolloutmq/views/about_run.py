"""What is known of a run beside its numbers: config, changes, versions, command, note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffer.run.run import Run
from rolloutmq.config.kept_config import read_config
from rolloutmq.run_owner import read_record
from rolloutmq.versions import all_versions
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.run_note import read_note
from rolloutmq.views.setting_view import overrides, time_text

_ON_SERVER = ("not here", "written", "dead letters")  # the server knows better


def about_run(folder: Path | None, run: Run | None = None, account: str = "") -> dict[str, Any]:
    """Return it as JSON, from the folder, the server, or both.

    `account`: that of a run which is about to end; its record has it later.
    """
    record = read_record(folder) if folder else None
    facts = {"run": run.name, "nonce": run.nonce} if run else {}
    if record:
        facts |= {"host": record.host, "started": time_text(int(1000 * record.started))}
    known = RunFolder(folder).facts() if folder else {}
    facts |= {name: text for name, text in known.items() if not (run and name in _ON_SERVER)}
    facts |= {"account": account} if account else {}
    return {
        "facts": facts,
        "note": read_note(folder).model_dump() if folder else None,
        "changed": list(overrides(run.settings)) if run else [],
        "versions": record.versions if record and record.versions else all_versions(),
        "config": [[*key] for key in read_config(folder)] if folder else [],
    }
