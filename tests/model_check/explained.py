"""Mutations that no small history finds: why, and which test does.

A story is a function of `tests/buffer/invariants`: `test_mutations.py` requires that it fails.
"""

from __future__ import annotations

EXPLAINED: dict[str, tuple[str, ...]] = {
    "needs a caller against the protocol (a checkpoint of another run, a prompt that was not stored, a take before the pools are clamped, a commit of more than is trained, a step behind the committed one): tests/buffer/ledger/test_trainer.py, test_batches.py, tests/buffer/groups/test_producing.py": (
        "I3 | enqueue | if samples > 0 and size == 0 then | if false then",
        "I6 | commit | keep = math.min(keep, committed) | {'retain_batches': 9}",
        "I6 | take_batch | if step <= num(steps[3]) then return {'COMMITTED', int(num(steps[2]))} end | {'retain_batches': 9}",
        "I6 | trainer_open | local is_other = run_nonce ~= '' and run_nonce ~= actual and run_nonce ~= continues | local is_other = false",
        "I8 | take_batch | if redis.call('HGET', control, 'recovering') then return {'RECOVERING'} end",
    ),
    "needs a loss of server data, which no history has: tests/integration/test_server_loses_data.py": (
        "I3 | enqueue | (ended_place(bitmaps, draw) or redis.call('EXISTS', record) == 1) | ended_place(bitmaps, draw)",
        "I3 | enqueue | known = redis.call('EXISTS', unpack(records)) | known = 0",
        "I3 | enqueue | start + #records - 1, 'BIT' | start, 'BIT'",
        "I5 | take_batch | if step ~= num(steps[1]) + 1 then return {'GAP', int(num(steps[1]))} end",
        "I6 | commit | if step > taken then return {'GAP', int(taken)} end",
        "I6 | trainer_open | if not again and taken < step and not behind then return {'BEHIND', int(taken)} end",
        "I8 | dissolve_batch | math.min(tonumber(version), after[lineage] or lowest) | tonumber(version)",
        "I12 | mark_trained | count_bytes(bytes, 0, num(held.prompt) + (held.payload ~= 'init' and num(held.size) or 0))",
        "I12 | restore_batch | count_bytes(bytes, entry.size, | count_bytes(bytes, 0,",
    ),
    "needs a forged key: tests/buffer/redis/server/test_acl_matrix.py": (
        "I3 | enqueue | local start = next_draw(cursors, task) | local start = num(redis.call('HGET', progress, 'cursor'))",
    ),
    "needs a batch that may be short, or several tasks: tests/buffer/ledger/test_batches.py": (
        "I5 | take_batch | if ready_in_all == 0 then return {'EMPTY'} end",
    ),
    "needs a trainer that dies between quarantine and refill, and its late call: story who_was_replaced_changes_nothing": (
        "I7 | refill | if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end",
    ),
    "keeps groups that are too old for the next step, or counts groups that came as still awaited. No invariant of the scripts forbids it; only the plan of the producer is wrong. Stories a_place_that_was_left_is_filled_once_and_in_the_record, what_a_batch_lacks_is_still_of_use": (
        "I5 | refill | redis.call('HDEL', ledger, 'awaits')",
        "I5 | trainer_open | redis.call('HDEL', ledger, 'awaits')",
        "I8 | refill | await(#open - #members) | {'stale_threshold': 1}",
        "I8 | take_batch | redis.call('HDEL', ledger, 'awaits') | {'stale_threshold': 1}",
    ),
    "needs another order policy: tests/buffer/groups/test_order.py": (
        "I8 | include/next_in_order | (version == 'inf' or tonumber(version) >= oldest) | true | {'order': 'fifo'}",
    ),
    "needs an unusable group, and beside it one that is too old, three steps after the beginning: story nothing_too_stale_is_taken": (
        "I8 | quarantine | cut_of(header, string.match(gid, '^(.*)%-%d+$')) | '-inf'",
        "I8 | refill | cut_of(header, task) | '-inf'",
    ),
    "needs weights of three lineages, and groups of two of them: tests/buffer/ledger/test_trainer.py": (
        "I8 | include/staleness | if tonumber(fork) < tonumber(version) then version = fork end",
        "I8 | rescore | for _, member in ipairs(pooled.members) do redis.call('ZADD', pooled.pool, pooled.top, member) end",
        "I8 | trainer_open | redis.call('HSET', control, 'recovering', int(math.min(step, tonumber(undone or step))))",
        "I8 | trainer_open | math.min(step, tonumber(undone or step)) | step",
        "I8 | rescore | step = math.min(step, tonumber(undone or step))",
        "I9 | include/staleness | if least[1] == '' or tonumber(living) < tonumber(least[1]) then | if least[1] == '' then",
    ),
    "a paused run has no open lane, so nothing is claimed without this line; the worker only misses the reason: story a_paused_worker_claims_nothing": (
        "I10 | claim | if reply[4] == '' then reply[1] = 'PAUSED' return reply end",
    ),
    "only the deadline of a clock that was set back while no one reaped: story nobody_loses_a_lease_to_an_outage": (
        "I11 | include/clock | if now < last or now - last > lease_ms / 2 then | if now - last > lease_ms / 2 then",
    ),
    'needs an unusable group of a worker that is still registered; history "open positions are filled" is too deep for it: story poison_counts_against_its_worker': (
        "I11 | quarantine | if is_known then redis.call('HINCRBY', worker_records .. owner, 'quarantined', 1) end",
    ),
    "needs eight unusable groups of one worker, or ten minutes between them: tests/integration/test_hostile_payloads.py": (
        "I11 | quarantine | barred_ms = int(now)",
        "I11 | claim | if bad and barred_ms ~= '0' then | if false then",
        "I11 | quarantine | now - num(since) > window_ms | false",
    ),
    "bytes that nobody needs stay in memory, which breaks no invariant of the index: tests/buffer/ledger/test_memory.py, story bytes_that_nobody_needs_are_freed": (
        "I12 | submit | if payload ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[2]) end",
        "I12 | commit | redis.call('SADD', garbage, unpack(prompts))",
        "I12 | forget | redis.call('SADD', garbage, unpack(payloads))",
    ),
    "a server in memory never refuses a script: tests/buffer/ledger/test_full_server.py": (
        "I12 | heartbeat | #!lua flags=allow-oom | #!lua",
        "I12 | reconcile | #!lua flags=allow-oom | #!lua",
        "I12 | receipt | #!lua flags=allow-oom | #!lua",
        "I12 | release | #!lua flags=allow-oom | #!lua",
        "I12 | take_batch | #!lua flags=allow-oom | #!lua",
        "I12 | commit | #!lua flags=allow-oom | #!lua",
    ),
    "needs a command that arrives again behind a claim and a second failure: story a_call_that_is_repeated_late_is_harmless": (
        "I13 | requeue | or held[8] == operation",
    ),
    'breaks no invariant of one state, only the wish of the operator: story a_call_that_is_repeated_late_is_harmless, history "an operator interferes" finished from each state': (
        "I13 | include/operations | operation .. ' ' .. done | operation",
    ),
    "needs two different reports of one producer: story a_call_that_is_repeated_late_is_harmless": (
        "I13 | halt | begin_operation(progress, 'halt_ops', operation) | true",
    ),
    "needs groups that no worker made: tests/buffer/groups/test_put.py, test_update.py": (
        "I12 | put | count_bytes(bytes, prompt, 0) | {'tail_batch_trigger_size': 0}",
        "I12 | put | count_bytes(bytes, prompt + size, 0) | {'tail_batch_trigger_size': 0}",
        "I12 | update | replaces == 'init' and 0 or | {'tail_batch_trigger_size': 0}",
        "I12 | update | replaces == 'init' and 0 or num(held[6]) | 0 | {'tail_batch_trigger_size': 0}",
    ),
}
