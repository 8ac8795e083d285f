#!lua
-- reissue: return aborted or expired groups to the queue, as many as there is room for, before new prompts.
-- KEYS control HASH, progress HASH, ledger HASH, completed ZSET, age_index ZSET, jobs_eval STREAM
-- KEYS jobs_resume STREAM, jobs_fresh STREAM, groups prefix
-- KEYS pool         ZSET    aborted or expired
-- KEYS bell_workers LIST, events STREAM, bytes HASH, leases ZSET
-- ARGV nonce     token        of the producer
-- ARGV target    ''|0..       total of groups that the task may have started or used; '' = the one in progress
-- ARGV threshold ''|0..       stale threshold in steps; '' = groups of this task do not age
-- ARGV lane      resume|eval  lane in which the groups wait
-- ARGV at_least  0..          do nothing while the pool holds fewer (tail batch)
-- ARGV tail_step ''|1..       last train step of the tail batch that these groups begin; '' = they begin none
-- ARGV limit     1..500       largest number of groups
-- ARGV byte_limit 0..          payload bytes of the run from which no group is started; 0 = no bound
-- ARGV max_in_flight ''|1..       largest number of groups of the task in flight; '' = no bound
-- replies OK reissued left | FENCED | CLOSED mode | FULL held byte_limit | STOPPED
-- keeps I1, I12 (started groups up to the high mark); bounded by the room, so that a repeated call cannot overshoot (I13)

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
target = target or num(redis.call('HGET', progress, 'target'))
local held = redis.call('ZCARD', pool)
if held == 0 or held < at_least then return {'OK', 0, held} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
if is_refused(bytes, byte_limit, leases, ledger) then return {'FULL', int(held_bytes(bytes)), int(byte_limit)} end
if redis.call('HEXISTS', progress, 'stopped') == 1 then return {'STOPPED'} end
-- what an evaluation has drawn needs no room, but for `max_in_flight`
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, age_index, ledger, target, threshold, max_in_flight,
  lane == 'eval' and target - held)
local jobs = lane == 'eval' and jobs_eval or jobs_resume
local found = free > 0 and redis.call('ZRANGE', pool, 0, math.min(free, limit) - 1) or {}
local gids, records, members = records_of(groups, found, 'payload', 'version')
local count = #members
if count == 0 then return {'OK', 0, held} end
redis.call('ZREM', pool, unpack(members))
-- with the groups: a producer that dies now, or another one, continues the same batch
if tail_step then redis.call('HSET', progress, 'tail_step', int(tail_step)) end
for i, gid in ipairs(gids) do
  to_waiting(jobs, groups .. gid, gid, lane, records[i][1])
  keep_age(age_index, gid, records[i][1], records[i][2])
end
wake(bell_workers, count)
log_event(events, 'reissued', 'groups', count)
return {'OK', count, held - count}
