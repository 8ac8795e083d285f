"""The copy of what was set that the folder of a run keeps: a server may lose everything.

<run folder>/settings.json    {"nonce": "…", "record": {…}}, of the run with this nonce
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson
from pydantic import ValidationError

from buffer.errors import ConfigError
from buffer.ids import new_nonce
from buffer.model.settings_record import SettingsRecord

FILE = "settings.json"


class KeptSettings:
    """Keeps the record of a run in its folder.

    Each process of the run that has the folder writes what it read last from the server; the
    trainer does before each step.

    Usage:
        kept = KeptSettings(config.run.folder, run.nonce)
        kept.keep(run.settings)    # writes only what is new
        kept.read()
    """

    def __init__(self, folder: Path, nonce: str) -> None:
        self._file = folder / FILE
        self._nonce = nonce
        self._last: SettingsRecord | None = None

    def keep(self, record: SettingsRecord) -> None:
        """Write the record, unless it is the one that was written last. It is on disk then."""
        if record == self._last:
            return
        data = orjson.dumps({"nonce": self._nonce, "record": record.model_dump(mode="json")})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_name(f".{FILE}.{new_nonce()[:8]}.tmp")
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self._file)
        self._last = record

    def read(self) -> SettingsRecord | None:
        """Return the record; None if the folder has none of this run.

        Raises ConfigError for a file that cannot be read.
        """
        try:
            content = orjson.loads(self._file.read_bytes())
            if content["nonce"] != self._nonce:
                return None
            return SettingsRecord.model_validate(content["record"])
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
            raise ConfigError(
                f"{self._file} does not contain the settings of a run",
                hint="remove it: the run then begins with the values of its config, and what "
                "`rolloutmq set` had changed must be set again",
            ) from error
