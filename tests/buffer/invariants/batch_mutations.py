"""Lines that keep I5 to I9."""

from __future__ import annotations

from tests.buffer.invariants import batches
from tests.buffer.invariants.batches import FIFO, ON_POLICY, RETAINED
from tests.buffer.invariants.mutation import Mutation

FENCED = "if redis.call('HGET', control, '{role}') ~= nonce then return {{'FENCED'}} end\n"
TRAINER = FENCED.format(role="trainer")
PRODUCER = FENCED.format(role="producer")

BATCHES = [
    Mutation(
        "I5",
        "take_batch",
        "if redis.call('EXISTS', batch) == 1 then return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))} end\n",
        batches.a_step_is_taken_once_and_in_turn,
    ),
    Mutation(
        "I5",
        "take_batch",
        "if step ~= num(steps[1]) + 1 then return {'GAP', int(num(steps[1]))} end\n",
        batches.a_step_is_taken_once_and_in_turn,
    ),
    Mutation(
        "I5",
        "take_batch",
        "if ready_in_all == 0 then return {'EMPTY'} end\n",
        batches.a_step_is_taken_once_and_in_turn,
    ),
    Mutation(
        "I5",
        "quarantine",
        "redis.call('LSET', batch, 0, header)\n",
        batches.a_changed_batch_is_its_record,
    ),
    Mutation(
        "I5",
        "quarantine",
        "  redis.call('LSET', batch, place, line)\n",
        batches.a_changed_batch_is_its_record,
    ),
    Mutation(
        "I5",
        "refill",
        "redis.call('LSET', batch, 0, before .. table.concat(notes, ','))\n",
        batches.a_place_that_was_left_is_filled_once_and_in_the_record,
    ),
    Mutation(
        "I5",
        "refill",
        "redis.call('RPUSH', batch, unpack(lines))\n",
        batches.a_place_that_was_left_is_filled_once_and_in_the_record,
    ),
    Mutation(
        "I5",
        "refill",
        "    redis.call('HDEL', ledger, 'awaits')\n",
        batches.a_place_that_was_left_is_filled_once_and_in_the_record,
    ),
    Mutation(
        "I5",
        "trainer_open",
        "redis.call('HDEL', ledger, 'awaits')",
        batches.a_place_that_was_left_is_filled_once_and_in_the_record,
    ),
    Mutation(
        "I6",
        "commit",
        "keep = math.min(keep, committed)\n",
        batches.nothing_is_freed_that_a_kept_checkpoint_may_ask_for,
        limits=RETAINED,
    ),
    Mutation(
        "I6",
        "commit",
        "if freed < keep then entries = redis.call('LRANGE', batch, 1 + done, done + limit) end",
        batches.nothing_is_freed_that_a_kept_checkpoint_may_ask_for,
        new="entries = redis.call('LRANGE', batch, 1 + done, done + limit)",
    ),
    Mutation(
        "I6",
        "commit",
        "if step > taken then return {'GAP', int(taken)} end\n",
        batches.nothing_is_freed_that_a_kept_checkpoint_may_ask_for,
    ),
    Mutation(
        "I6",
        "take_batch",
        "if step <= num(steps[3]) then return {'COMMITTED', int(num(steps[2]))} end\n",
        batches.nothing_is_freed_that_a_kept_checkpoint_may_ask_for,
        limits=RETAINED,
    ),
    Mutation(
        "I6",
        "trainer_open",
        "if not again and step < keep and not regenerate then return {'BELOW', int(keep)} end\n",
        batches.a_trainer_opens_what_is_kept_of_the_run_it_knows,
    ),
    Mutation(
        "I6",
        "trainer_open",
        "if not again and taken < step and not behind then return {'BEHIND', int(taken)} end\n",
        batches.a_trainer_opens_what_is_kept_of_the_run_it_knows,
    ),
    Mutation(
        "I6",
        "trainer_open",
        "local is_other = run_nonce ~= '' and run_nonce ~= actual and run_nonce ~= continues\n",
        batches.a_trainer_opens_what_is_kept_of_the_run_it_knows,
        new="local is_other = false\n",
    ),
    Mutation(
        "I7",
        "trainer_open",
        "silent_ms < timeout_ms and ",
        batches.there_is_one_trainer_and_one_producer,
        new="false and ",
    ),
    Mutation(
        "I7",
        "producer_open",
        "silent_ms < timeout_ms and ",
        batches.there_is_one_trainer_and_one_producer,
        new="false and ",
    ),
    Mutation("I7", "take_batch", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "commit", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "quarantine", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "refill", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "publish_weights", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "rescore", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "set_target", TRAINER, batches.who_was_replaced_changes_nothing),
    Mutation(
        "I7",
        "control",
        "if who == 'trainer' and ",
        batches.who_was_replaced_changes_nothing,
        new="if false and ",
    ),
    Mutation(
        "I7",
        "beat",
        "if redis.call('HGET', control, role) ~= nonce then return {'FENCED'} end\n",
        batches.who_was_replaced_changes_nothing,
    ),
    Mutation("I7", "enqueue", PRODUCER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "reissue", PRODUCER, batches.who_was_replaced_changes_nothing),
    Mutation("I7", "halt", PRODUCER, batches.who_was_replaced_changes_nothing),
    Mutation(
        "I8",
        "take_batch",
        "threshold and int(step - threshold) or '-inf'",
        batches.nothing_too_stale_is_taken,
        new="'-inf'",
    ),
    Mutation(
        "I8",
        "include/next_in_order",
        "(version == 'inf' or tonumber(version) >= oldest)",
        batches.nothing_too_stale_is_taken,
        new="true",
        limits=FIFO,
    ),
    Mutation(
        "I8",
        "quarantine",
        "cut_of(header, string.match(gid, '^(.*)%-%d+$'))",
        batches.nothing_too_stale_is_taken,
        new="'-inf'",
    ),
    Mutation(
        "I8",
        "refill",
        "cut_of(header, task)",
        batches.nothing_too_stale_is_taken,
        new="'-inf'",
    ),
    *(
        Mutation("I8", file, old, batches.what_a_batch_lacks_is_still_of_use, limits=ON_POLICY)
        for file, old in (
            ("include/steps", "awaits > 0 and math.min(awaits, taken + 1) or "),
            ("refill", "    redis.call('HSET', ledger, 'awaits', int(step))\n"),
            ("refill", "  await(#open)\n"),
            ("refill", "await(#open - #members)\n"),
            ("take_batch", "redis.call('HDEL', ledger, 'awaits')"),
        )
    ),
    Mutation(
        "I8",
        "include/staleness",
        "    if tonumber(fork) < tonumber(version) then version = fork end\n",
        batches.weights_that_were_forked_away_count_as_the_fork,
    ),
    Mutation(
        "I8",
        "include/staleness",
        "    if name == lineage then break end\n",
        batches.weights_that_were_forked_away_count_as_the_fork,
    ),
    Mutation(
        "I8",
        "rescore",
        "  for _, member in ipairs(pooled.members) do redis.call('ZADD', pooled.pool, pooled.top, member) end\n",
        batches.weights_that_were_forked_away_count_as_the_fork,
    ),
    Mutation(
        "I8",
        "dissolve_batch",
        "math.min(tonumber(version), after[lineage] or lowest)",
        batches.a_fork_counts_for_groups_in_a_batch,
        new="tonumber(version)",
    ),
    Mutation(
        "I8",
        "trainer_open",
        "  redis.call('HSET', control, 'recovering', int(math.min(step, tonumber(undone or step))))\n",
        batches.a_new_trainer_takes_nothing_before_the_pools_are_clamped,
    ),
    Mutation(
        "I8",
        "trainer_open",
        "math.min(step, tonumber(undone or step))",
        batches.a_fork_counts_although_its_trainer_died_before_it_clamped,
        new="step",
    ),
    Mutation(
        "I8",
        "rescore",
        "step = math.min(step, tonumber(undone or step))\n",
        batches.a_fork_counts_although_its_trainer_died_before_it_clamped,
    ),
    Mutation(
        "I8",
        "take_batch",
        "if redis.call('HGET', control, 'recovering') then return {'RECOVERING'} end\n",
        batches.a_new_trainer_takes_nothing_before_the_pools_are_clamped,
    ),
    Mutation(
        "I8",
        "refresh",
        "'(' .. cut",
        batches.expiring_leaves_what_may_still_be_used,
        new="cut",
    ),
    Mutation(
        "I9",
        "include/staleness",
        "if least[1] == '' or tonumber(living) < tonumber(least[1]) then",
        batches.the_oldest_of_several_lineages_counts,
        new="if least[1] == '' then",
    ),
    Mutation(
        "I9",
        "submit",
        "'crc', crc, 'version', version, ",
        batches.a_group_is_as_old_as_its_oldest_token,
        new="'crc', crc, ",
    ),
]
