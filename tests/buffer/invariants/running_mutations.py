"""Lines that keep I10 to I13."""

from __future__ import annotations

from tests.buffer.invariants import running
from tests.buffer.invariants.mutation import Mutation
from tests.buffer.invariants.running import TWO_TRIES

RUNNING = [
    Mutation(
        "I10",
        "claim",
        "if reply[4] == '' then reply[1] = 'PAUSED' return reply end\n",
        running.a_paused_worker_claims_nothing,
    ),
    Mutation(
        "I10",
        "claim",
        "local is_open = lane_is_open(control, lane)",
        running.a_paused_worker_claims_nothing,
        new="local is_open = true",
    ),
    Mutation(
        "I10",
        "claim",
        "if reply[5] ~= weights then reply[1] = 'STALE' return reply end\n",
        running.old_weights_claim_nothing,
    ),
    Mutation(
        "I10",
        "enqueue",
        "if not lane_is_open(control, lane) then",
        running.a_paused_worker_claims_nothing,
        new="if false then",
    ),
    Mutation(
        "I10",
        "include/receipts",
        "  if must_be_empty and redis.call('SCARD', holds) > 0 then return end\n",
        running.a_receipt_means_no_leases,
    ),
    Mutation("I10", "include/receipts", "  if ack ~= num(epoch) then return end\n", running.a_receipt_means_no_leases),
    Mutation(
        "I10",
        "include/control_changes",
        "strictness[holds[1]] > strictness[holds[3]] and holds[1] or holds[3]",
        running.the_operators_pause_survives_the_trainer,
        new="holds[3]",
    ),
    Mutation(
        "I10",
        "include/control_changes",
        "local epoch = redis.call('HINCRBY', control, 'epoch', 1)",
        running.the_operators_pause_survives_the_trainer,
        new="local epoch = redis.call('HINCRBY', control, 'epoch', 0)",
    ),
    Mutation(
        "I11",
        "claim",
        "    redis.call('HINCRBY', groups .. gid, 'tries', 1)\n",
        running.tries_are_used_up_by_failures_only,
        limits=TWO_TRIES,
    ),
    Mutation(
        "I11",
        "release",
        "  redis.call('HINCRBY', record, 'tries', -1)\n",
        running.tries_are_used_up_by_failures_only,
        limits=TWO_TRIES,
    ),
    Mutation(
        "I11",
        "submit",
        "'tries', int(num(held[6]) - 1), ",
        running.tries_are_used_up_by_failures_only,
        limits=TWO_TRIES,
    ),
    Mutation(
        "I11",
        "include/retries",
        "if num(fields[1]) < max_tries then",
        running.tries_are_used_up_by_failures_only,
        new="do",
        limits=TWO_TRIES,
    ),
    Mutation(
        "I11",
        "include/retries",
        "  redis.call('SET', keys.dead_letters .. gid, reason)\n",
        running.tries_are_used_up_by_failures_only,
        limits=TWO_TRIES,
    ),
    Mutation(
        "I11",
        "reap",
        "if now < grace then return {'GRACE', int(grace - now)} end\n",
        running.nobody_loses_a_lease_to_an_outage,
    ),
    Mutation(
        "I11",
        "include/grace",
        "if now < last or now - last > lease_ms / 2 then",
        running.nobody_loses_a_lease_to_an_outage,
        new="if now < last then",
    ),
    Mutation(
        "I11",
        "include/grace",
        "if now < last or now - last > lease_ms / 2 then",
        running.nobody_loses_a_lease_to_an_outage,
        new="if now - last > lease_ms / 2 then",
    ),
    Mutation(
        "I11",
        "reap",
        "  redis.call('ZADD', leases, int(now + lease_ms), gid)\n",
        running.a_deadline_of_a_clock_that_stepped_back_comes_nearer,
    ),
    Mutation(
        "I11",
        "quarantine",
        "if is_known then redis.call('HINCRBY', worker_records .. owner, 'quarantined', 1) end\n",
        running.poison_counts_against_its_worker,
    ),
    Mutation(
        "I11",
        "quarantine",
        "    barred_ms = int(now)\n",
        running.who_hands_in_too_much_poison_claims_nothing_more,
    ),
    Mutation(
        "I11",
        "claim",
        "if bad and barred_ms ~= '0' then",
        running.who_hands_in_too_much_poison_claims_nothing_more,
        new="if false then",
    ),
    Mutation(
        "I11",
        "quarantine",
        "now - num(since) > window_ms",
        running.old_poison_is_forgiven,
        new="false",
    ),
    Mutation(
        "I12",
        "enqueue",
        "if is_full(bytes, mark) and (waiting > 0 or is_refused(bytes, mark, leases, ledger)) then",
        running.nothing_fresh_starts_above_the_low_mark,
        new="if false then",
    ),
    Mutation(
        "I12",
        "claim",
        "if is_open and is_full(bytes, mark) and (",
        running.nothing_fresh_starts_above_the_low_mark,
        new="if false and (",
    ),
    Mutation(
        "I12",
        "submit",
        "if payload ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[2]) end\n",
        running.bytes_that_nobody_needs_are_freed,
    ),
    Mutation(
        "I12", "commit", "  redis.call('SADD', garbage, unpack(prompts))\n", running.bytes_that_nobody_needs_are_freed
    ),
    Mutation(
        "I12",
        "forget",
        "    redis.call('SADD', garbage, unpack(payloads))\n",
        running.bytes_that_nobody_needs_are_freed,
    ),
    Mutation("I12", "forget", "  count_bytes(bytes, 0, went)\n", running.bytes_that_nobody_needs_are_freed),
    *[
        Mutation("I12", file, "#!lua flags=allow-oom\n", running.what_drains_works_when_memory_is_full, new="#!lua\n")
        for file in ("heartbeat", "receipt", "release", "take_batch", "commit")
    ],
    Mutation("I13", "claim", "if known[2] == token then", running.a_repeated_call_is_harmless, new="if false then"),
    Mutation(
        "I13",
        "enqueue",
        "if done[1] == operation then return {'OK', num(done[2]), int(start)} end\n",
        running.a_repeated_call_is_harmless,
    ),
    Mutation(
        "I13", "submit", "if payload == token then return {'OK', held[9]} end\n", running.a_repeated_call_is_harmless
    ),
    Mutation(
        "I13",
        "submit",
        "if status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then",
        running.a_repeated_call_is_harmless,
        new="if false then",
    ),
    Mutation(
        "I13", "release", "if held[6] == token then return {'OK', held[2]} end\n", running.a_repeated_call_is_harmless
    ),
    Mutation(
        "I13",
        "requeue",
        " or held[8] == operation",
        running.a_call_that_is_repeated_late_is_harmless,
    ),
    Mutation(
        "I13", "drop", "if place == 'dropped' then return {'OK', place} end\n", running.a_repeated_call_is_harmless
    ),
    Mutation(
        "I13",
        "quarantine",
        "if found then return {'OK', revision,",
        running.a_repeated_call_is_harmless,
        new="if false then return {'OK', revision,",
    ),
    Mutation(
        "I13",
        "control",
        "redis.call('HGET', control, who .. '_op') == operation",
        running.a_repeated_call_is_harmless,
        new="false",
    ),
    Mutation(
        "I13",
        "publish_weights",
        "if redis.call('HGET', control, 'weights') ~= weights then",
        running.a_repeated_call_is_harmless,
        new="do",
    ),
    Mutation(
        "I13",
        "beat",
        "redis.call('HGET', control, role .. '_closed') == nonce",
        running.a_repeated_call_is_harmless,
        new="false",
    ),
    Mutation(
        "I13",
        "trainer_open",
        "local again = holder[1] == nonce\n",
        running.a_repeated_call_is_harmless,
        new="local again = false\n",
    ),
]
