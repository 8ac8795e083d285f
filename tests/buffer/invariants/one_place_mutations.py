"""Lines that keep I1 to I4."""

from __future__ import annotations

from tests.buffer.invariants import one_place, running
from tests.buffer.invariants.mutation import Mutation

ONE_PLACE = [
    Mutation(
        "I1",
        "submit",
        "let_go(leases, leased, held[11], gid, token)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "claim",
        "    redis.call('XDEL', jobs, unpack(given[n]))\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "release",
        "redis.call('HINCRBY', progress, 'running', -1)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "include/take_back",
        "    let_go(under.leases, under.leased_by .. one.worker, one.worker, one.gid, one.token)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "include/take_back",
        "      redis.call('HINCRBY', one.keys.progress, 'running', -1)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "reissue",
        "redis.call('ZREM', pool, unpack(members))\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "refresh",
        "  redis.call('ZREM', pool, unpack(members))\n",
        one_place.what_expires_is_in_one_pool,
    ),
    Mutation(
        "I1",
        "drop",
        "redis.call('SETBIT', dropped, draw, 1)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "commit",
        "  redis.call('SETBIT', tasks[name].archived, tonumber(draw), 1)\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I1",
        "include/dead_letter",
        "  redis.call('HINCRBY', keys.progress, 'dead', 1)\n",
        one_place.by_hand_keeps_the_account,
    ),
    Mutation(
        "I1",
        "include/remove_dead_or_pooled",
        "    redis.call('ZREM', keys.dead, gid)\n",
        one_place.by_hand_keeps_the_account,
    ),
    Mutation(
        "I2",
        "submit",
        "if held[4] ~= token or stage ~= 'running' then return {'FENCED'} end\n",
        one_place.an_old_token_changes_nothing,
    ),
    Mutation(
        "I2",
        "release",
        "if held[1] ~= token or held[2] ~= 'running' then return {'FENCED'} end\n",
        one_place.an_old_token_changes_nothing,
    ),
    Mutation(
        "I2",
        "heartbeat",
        "if is_agreed and count > 0 then",
        one_place.a_lease_is_renewed_by_its_owner_only,
        new="if count > 0 then",
    ),
    Mutation(
        "I2",
        "heartbeat",
        "local is_agreed = count == held and num(redis.call('HGET', leased, 'digest')) == digest\n",
        one_place.what_a_worker_does_not_know_is_taken_back,
        new="local is_agreed = count == held\n",
    ),
    Mutation(
        "I2",
        "reconcile",
        "if math.abs(now - unknown.claimed_ms) > lease_ms then",
        one_place.a_claim_under_way_is_not_taken_back,
        new="do",
    ),
    Mutation(
        "I2",
        "reconcile",
        "  if not held[gid .. ' ' .. token] then reply[#reply + 1] = n end\n",
        one_place.an_old_token_changes_nothing,
    ),
    Mutation(
        "I2",
        "reap",
        "for _, one in ipairs(found) do redis.call('HDEL', worker_records .. one.worker, 'nonce', 'claim', 'claimed') end\n",
        one_place.a_silent_registration_ends_before_its_groups_are_taken,
    ),
    Mutation(
        "I2",
        "include/leased",
        "  if redis.call('HDEL', leased, gid) == 0 then return end\n",
        one_place.every_move_keeps_the_account,
    ),
    Mutation(
        "I2",
        "claim",
        "if known[1] ~= nonce then return {'UNKNOWN'} end\n",
        running.a_stranger_claims_nothing,
    ),
    Mutation(
        "I3",
        "enqueue",
        "if start ~= cursor then return {'CURSOR', int(start)} end\n",
        one_place.no_prompt_is_skipped_or_doubled,
    ),
    Mutation(
        "I3",
        "enqueue",
        "(ended_place(bitmaps, draw) or redis.call('EXISTS', record) == 1)",
        one_place.no_prompt_is_skipped_or_doubled,
        new="ended_place(bitmaps, draw)",
    ),
    Mutation(
        "I3",
        "enqueue",
        "known = redis.call('EXISTS', unpack(records))",
        one_place.no_prompt_is_skipped_or_doubled,
        new="known = 0",
    ),
    Mutation(
        "I3",
        "enqueue",
        "start + #records - 1, 'BIT'",
        one_place.a_draw_that_has_ended_does_not_start_again,
        new="start, 'BIT'",
    ),
    Mutation(
        "I3",
        "enqueue",
        "move_cursor(cursors, progress, task, start + drawn)\n",
        one_place.no_prompt_is_skipped_or_doubled,
    ),
    Mutation(
        "I3",
        "enqueue",
        "local start = next_draw(cursors, task)",
        one_place.a_forged_copy_of_the_cursor_moves_nothing,
        new="local start = num(redis.call('HGET', progress, 'cursor'))",
    ),
    Mutation(
        "I3",
        "enqueue",
        "  if enqueued >= free or ",
        one_place.nothing_starts_beyond_the_target,
        new="  if ",
    ),
    Mutation(
        "I3",
        "enqueue",
        "if samples > 0 and size == 0 then",
        one_place.a_prompt_without_bytes_is_not_started,
        new="if false then",
    ),
    Mutation(
        "I4",
        "take_batch",
        "if is_short and strict then return reply end\n",
        one_place.a_batch_is_of_all_tasks_or_of_none,
    ),
    Mutation(
        "I4",
        "take_batch",
        "  redis.call('HINCRBY', progress, 'consumed', #chosen[n])\n",
        one_place.a_batch_is_of_all_tasks_or_of_none,
    ),
    Mutation(
        "I4",
        "include/next_in_order",
        "  redis.call('ZREM', pool, unpack(members))\n",
        one_place.a_batch_is_of_all_tasks_or_of_none,
    ),
]
