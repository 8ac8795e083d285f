"""The lock that a thread holds while transformers creates or loads a model."""

from __future__ import annotations

import threading

MODEL_LOADING = threading.Lock()
"""One thread of a process loads at a time: transformers sets process-wide switches meanwhile, and
another thread may get a model without values ("Cannot copy out of meta tensor")."""
