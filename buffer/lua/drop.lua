#!lua flags=allow-oom
-- drop: end a group by hand: one that waits, is in a pool or is dead; or a running one, if its worker is named.
-- KEYS groups prefix, progress HASH, queues prefix, completed ZSET, aborted ZSET, expired ZSET, leases ZSET
-- KEYS leased_by prefix, dead ZSET, dead_letters prefix, ends prefix, dropped STRING
-- KEYS garbage SET, bell_producer LIST, events STREAM, bytes HASH, age_index ZSET, worker_tokens_of prefix
-- ARGV gid    gid
-- ARGV draw   0..69_999_999
-- ARGV revoke ''|name        worker whose lease on the group is revoked; '' = refuse a running group
-- ARGV sampled ''|sampled    by this worker: see shared/tokens.lua
-- replies OK stage_before | RUNNING owner | TAKEN batch | ENDED stage | UNKNOWN
-- keeps I1, I2 (a revoked token becomes invalid at once), I12 (frees), I13 (a dropped group stays dropped)

local held = held_fields(groups .. gid)
if not held then
  if redis.call('GETBIT', dropped, draw) == 1 then return {'OK', 'dropped'} end
  return answer_without_record(ends, gid)
end
local runs = held.stage == 'running'
if runs and (revoke == '' or held.owner ~= revoke) then return {'RUNNING', held.owner} end
if held.stage == 'taken' then return {'TAKEN', held.batch} end

local keys = {progress = progress, jobs = queues .. string.match(gid, '^(.*)%-%d+$') .. ':', completed = completed,
  aborted = aborted, expired = expired, age_index = age_index, leases = leases,
  leased_by = leased_by, dead = dead, dead_letters = dead_letters}
read_place(keys, held)
local new, _, _, total, closed = claimed_tokens(sampled, has_turns_of(held.token or '', held.payload) and held.counted)
if sampled ~= '' then hear(worker_tokens_of .. revoke, progress, string.match(gid, '^(.*)%-%d+$'), total, closed, new) end
add_tokens(progress, 'dropped', new)
end_tokens(progress, 'dropped', groups .. gid)
local before = remove_from_stage(keys, gid, held)
end_group(groups, garbage, bytes, gid, held)
redis.call('SETBIT', dropped, draw, 1)
redis.call('HINCRBY', progress, 'dropped', 1)
wake(bell_producer, 1)
log_event(events, 'dropped', 'gid', gid, 'from', before)
return {'OK', before}
