#!lua
-- enqueue: start the next draws of a data set, as many as there is room for, and move the cursor with them.
-- The caller has stored the INIT payloads of draws cursor, cursor+1, …; what is not enqueued expires by itself.
-- KEYS[1] control      HASH
-- KEYS[2] progress     HASH     of the task
-- KEYS[3] ledger       HASH     of the trainer
-- KEYS[4] completed    ZSET     pool of the task
-- KEYS[5] jobs_eval    STREAM
-- KEYS[6] jobs_resume  STREAM
-- KEYS[7] jobs_fresh   STREAM
-- KEYS[8] groups       prefix of the group records (HASH)
-- KEYS[9] archived     STRING   bitmap
-- KEYS[10] filtered    STRING   bitmap
-- KEYS[11] dropped     STRING   bitmap
-- KEYS[12] bell        LIST     of the workers
-- KEYS[13] events      STREAM
-- KEYS[14+] payload    STRING   INIT payload of each draw
-- ARGV[1] nonce        of the producer
-- ARGV[2] operation    nonce of this call
-- ARGV[3] task         name
-- ARGV[4] lane         fresh | eval
-- ARGV[5] cursor       that the caller expects
-- ARGV[6] target       groups in all that the task may have started or used; '' = the one in progress
-- ARGV[7] threshold    stale threshold in steps; '' = groups of this task do not age
-- ARGV[8+] samples     rollouts of each draw; 0 = the prompt cannot be used, count it as dropped
-- replies OK enqueued cursor | FENCED | CURSOR cursor | CLOSED mode | NO_PAYLOAD gid
-- keeps I1, I3 (compare-and-set in the step that enqueues), I12 (refuses here, not later), I13 (operation)
local control, progress, ledger, completed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local jobs_eval, jobs_resume, jobs_fresh, groups = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local archived, filtered, dropped, bell, events = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local nonce, operation, task, lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local expected, target, threshold = num(ARGV[5]), ARGV[6], ARGV[7]
local draws = #ARGV - 7

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
local done = redis.call('HMGET', progress, 'enqueue_op', 'enqueue_count', 'cursor', 'target')
local cursor = num(done[3])
if done[1] == operation then return {'OK', num(done[2]), int(cursor)} end
if cursor ~= expected then return {'CURSOR', int(cursor)} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
if target == '' then target = done[4] or '0' end
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, ledger, num(target), threshold)
for i = 1, draws do
  if num(ARGV[7 + i]) > 0 and redis.call('EXISTS', KEYS[13 + i]) == 0 then
    return {'NO_PAYLOAD', string.format('%s-%010d', task, cursor + i - 1)}
  end
end

local jobs, enqueued, drawn = lane == 'eval' and jobs_eval or jobs_fresh, 0, 0
for i = 1, draws do
  if enqueued >= free then break end
  local draw = cursor + i - 1
  local gid = string.format('%s-%010d', task, draw)
  local record, samples = groups .. gid, num(ARGV[7 + i])
  local ended = redis.call('GETBIT', archived, draw) + redis.call('GETBIT', filtered, draw) + redis.call('GETBIT', dropped, draw)
  -- after a server lost its last second the same draws come again: what exists already moves the cursor only
  if ended == 0 and redis.call('EXISTS', record) == 0 then
    redis.call('HINCRBY', progress, 'enqueued', 1)
    if samples == 0 then
      redis.call('SETBIT', dropped, draw, 1)
      redis.call('HINCRBY', progress, 'dropped', 1)
    else
      redis.call('PERSIST', KEYS[13 + i])
      redis.call('HSET', record, 'task', task, 'draw', int(draw), 'status', 'init', 'tries', 0, 'aborts', 0,
        'samples', samples, 'payload', 'init', 'chunks', 1, 'size', redis.call('STRLEN', KEYS[13 + i]))
      to_waiting(jobs, record, gid, lane, 'init')
      enqueued = enqueued + 1
    end
  end
  drawn = i
end
redis.call('HSET', progress, 'cursor', int(cursor + drawn), 'target', target,
  'enqueue_op', operation, 'enqueue_count', enqueued)
if enqueued > 0 then
  ring(bell, enqueued)
  log_event(events, 'enqueued', 'task', task, 'groups', enqueued, 'cursor', int(cursor + drawn))
end
return {'OK', enqueued, int(cursor + drawn)}
