"""The limits of one call to the server, which answers no other client while it works on it.

Measured with Valkey on one core of an AMD EPYC, with groups of 8 rollouts (165,888 bytes).
"""

from __future__ import annotations

GROUPS_PER_CALL = 100
"""Groups that one call of a script moves or checks: 1 to 2 ms (claim 1.3, check 1.9)."""

KEYS_PER_TRIP = 500
"""Short keys, members or records that one round trip reads: 0.9 ms of the server for records."""

BYTES_PER_TRIP = 8 * 2**20
"""Payload bytes in one round trip: 16 ms. Larger ones delay all other clients."""

BYTES_PER_VALUE = 1_048_000
"""Just below a size class of the allocator: 1,048,576 bytes cost 25 % more memory."""
