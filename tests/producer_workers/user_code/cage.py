"""Skip what needs bubblewrap on machines where it does not work, with the reason."""

from __future__ import annotations

import pytest

from buffer.errors import SandboxUnavailable
from producer_workers.user_code.sandbox import check_sandbox


def _missing() -> str:
    try:
        check_sandbox("bubblewrap")
    except SandboxUnavailable as error:
        return str(error)
    return ""


needs_bubblewrap = pytest.mark.skipif(bool(_missing()), reason=_missing())
