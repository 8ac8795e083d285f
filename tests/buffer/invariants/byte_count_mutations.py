"""Lines that count payload bytes (I12)."""

from __future__ import annotations

from tests.buffer.invariants import byte_count
from tests.buffer.invariants.byte_count import RETRIED
from tests.buffer.invariants.mutation import Mutation

WORKERS = byte_count.bytes_follow_the_groups_of_workers
EXPIRING = byte_count.bytes_follow_what_expires
OUTSIDE = byte_count.bytes_follow_groups_from_outside
LOSS = byte_count.bytes_follow_what_comes_back_after_a_loss
PROMPT_AND_RESULT = (
    "count_bytes(bytes, 0, num(held.prompt) + (held.payload ~= 'init' and num(held.size) or 0))\n"
)

BYTE_COUNT = [
    Mutation("I12", "enqueue", "count_bytes(bytes, came, 0)\n", WORKERS),
    Mutation("I12", "submit", "  count_bytes(bytes, 0, went + num(held[10]))\n", WORKERS),
    Mutation("I12", "submit", "  count_bytes(bytes, size, went)\n", WORKERS),
    Mutation(
        "I12",
        "submit",
        "count_bytes(bytes, size, went)",
        WORKERS,
        new="count_bytes(bytes, size, 0)",
    ),
    Mutation("I12", "requeue", "    count_bytes(bytes, 0, num(held[9]))\n", WORKERS),
    Mutation("I12", "drop", PROMPT_AND_RESULT, WORKERS),
    Mutation("I12", "drop", "num(held.prompt) + ", WORKERS),
    Mutation("I12", "commit", "count_bytes(bytes, 0, went)\n", WORKERS),
    Mutation("I12", "forget", "    went = went + num(size)\n", WORKERS),
    Mutation("I12", "refresh", "  count_bytes(bytes, 0, went)\n", EXPIRING, limits=RETRIED),
    Mutation("I12", "refresh", "  count_bytes(bytes, 0, went)\n", EXPIRING),
    Mutation("I12", "refresh", "    went = went + num(record[5])\n", EXPIRING),
    Mutation("I12", "put", "  count_bytes(bytes, prompt, 0)\n", OUTSIDE, limits=RETRIED),
    Mutation("I12", "put", "  count_bytes(bytes, prompt + size, 0)\n", OUTSIDE, limits=RETRIED),
    Mutation("I12", "update", "replaces == 'init' and 0 or ", OUTSIDE, limits=RETRIED),
    Mutation(
        "I12",
        "update",
        "replaces == 'init' and 0 or num(held[6])",
        OUTSIDE,
        new="0",
        limits=RETRIED,
    ),
    Mutation("I12", "mark_trained", f"      {PROMPT_AND_RESULT}", LOSS),
    Mutation(
        "I12",
        "restore_batch",
        "    count_bytes(bytes, entry.size, ",
        LOSS,
        new="    count_bytes(bytes, 0, ",
    ),
]
