from __future__ import annotations

import logging
import sys

from buffer.errors import ConfigError
from rolloutmq.process_log import MINUTE_S, OncePerMinute


def failed(row: int, kind: type[Exception] = KeyError) -> logging.LogRecord:
    try:
        raise kind(f"row {row}")
    except Exception as error:
        return logging.LogRecord(
            "rolloutmq.worker", 30, __file__, 1, "group failed: %s", (error,), sys.exc_info()
        )


def test_each_cause_is_logged_once_a_minute_with_the_number_of_those_left_out() -> None:
    now = [0.0]
    once = OncePerMinute(lambda: now[0])
    assert [once.filter(failed(row)) for row in range(5)] == [True] + [False] * 4
    assert once.filter(failed(0, ConfigError))
    plain = logging.LogRecord("rolloutmq.worker", 30, __file__, 1, "lease lost", (), None)
    assert once.filter(plain)
    assert once.filter(plain)
    now[0] = MINUTE_S
    again = failed(9)
    assert once.filter(again)
    assert vars(again)["left_out"] == 4
