#!lua
-- reissue: let aborted or expired groups wait again, as many as there is room for, before new prompts are drawn.
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
-- ARGV[1] nonce        of the producer
-- ARGV[2] target       groups in all that the task may have started or used; '' = the one in progress
-- ARGV[3] threshold    stale threshold in steps; '' = groups of this task do not age
-- ARGV[4] lane         where groups of this task wait again: resume | eval
-- ARGV[5] at_least     leave the pool alone while it holds fewer (tail batch)
-- ARGV[6] limit        groups at most
-- replies OK reissued left | FENCED | CLOSED mode
-- keeps I1; bounded by the room, so that repeating it cannot overshoot (I13)
local control, progress, ledger, completed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local jobs_eval, jobs_resume, jobs_fresh, groups = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local pool, bell, events = KEYS[9], KEYS[10], KEYS[11]
local nonce, target, threshold, lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local at_least, limit = num(ARGV[5]), num(ARGV[6])

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
if target == '' then target = redis.call('HGET', progress, 'target') end
local held = redis.call('ZCARD', pool)
if held == 0 or held < at_least then return {'OK', 0, held} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, ledger, num(target), threshold)
local count = math.min(free, limit, held)
if count <= 0 then return {'OK', 0, held} end

local jobs = lane == 'eval' and jobs_eval or jobs_resume
for _, member in ipairs(redis.call('ZRANGE', pool, 0, count - 1)) do
  local gid = string.match(member, ':(.*)$')
  redis.call('ZREM', pool, member)
  to_waiting(jobs, groups .. gid, gid, lane, redis.call('HGET', groups .. gid, 'payload'))
end
ring(bell, count)
log_event(events, 'reissued', 'groups', count)
return {'OK', count, held - count}
