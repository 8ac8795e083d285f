#!lua
-- reissue: let aborted or expired groups wait again, as many as there is room for, before new prompts are drawn.
-- include: bells, events, memory_marks, numbers, open_lanes, pool_records, room, waiting
-- KEYS[1] control      HASH
-- KEYS[2] progress     HASH     of the task
-- KEYS[3] ledger       HASH     of the trainer
-- KEYS[4] completed    ZSET     pool of the task
-- KEYS[5] jobs_eval    STREAM
-- KEYS[6] jobs_resume  STREAM
-- KEYS[7] jobs_fresh   STREAM
-- KEYS[8] groups       prefix of the group records (HASH)
-- KEYS[9] pool         ZSET     aborted or expired
-- KEYS[10] bell        LIST     of the workers
-- KEYS[11] events      STREAM
-- KEYS[12] bytes       HASH
-- KEYS[13] leases      ZSET
-- ARGV[1] nonce     token        of the producer
-- ARGV[2] target    ''|0..       groups in all that the task may have started or used; '' = the one in progress
-- ARGV[3] threshold ''|0..       stale threshold in steps; '' = groups of this task do not age
-- ARGV[4] lane      resume|eval  where groups of this task wait again
-- ARGV[5] at_least  0..          leave the pool alone while it holds fewer (tail batch)
-- ARGV[6] limit     1..500       groups at most
-- ARGV[7] mark      0..          payload bytes of the run from which nothing is started; 0 = no bound
-- ARGV[8] most      ''|1..       groups of the task in flight at most; '' = no bound
-- ARGV[9] patience  ''|1..       failures in a row after which nothing is started; '' = no bound
-- replies OK reissued left | FENCED | CLOSED mode | FULL held mark | STOPPED failures
-- keeps I1, I12 (begun groups up to the high mark); bounded by the room, so that repeating it cannot overshoot (I13)
local control, progress, ledger, completed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local jobs_eval, jobs_resume, jobs_fresh, groups = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local pool, bell, events, bytes, leases = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local nonce, target, threshold, lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local at_least, limit, mark, most, patience = num(ARGV[5]), num(ARGV[6]), num(ARGV[7]), ARGV[8], ARGV[9]

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
if target == '' then target = redis.call('HGET', progress, 'target') end
local held = redis.call('ZCARD', pool)
if held == 0 or held < at_least then return {'OK', 0, held} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
if is_refused(bytes, mark, leases, ledger) then return {'FULL', int(held_bytes(bytes)), int(mark)} end
local failures = too_many_failures(progress, patience)
if failures then return {'STOPPED', int(failures)} end
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, ledger, num(target), threshold, most)
local count = math.min(free, limit, held)
if count <= 0 then return {'OK', 0, held} end

local jobs = lane == 'eval' and jobs_eval or jobs_resume
local members = redis.call('ZRANGE', pool, 0, count - 1)
local gids, records = records_of(groups, members, 'payload')
redis.call('ZREM', pool, unpack(members))
for i, gid in ipairs(gids) do to_waiting(jobs, groups .. gid, gid, lane, records[i][1]) end
ring(bell, count)
log_event(events, 'reissued', 'groups', count)
return {'OK', count, held - count}
