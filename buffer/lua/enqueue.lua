#!lua
-- enqueue: start the next draws of a data set, as many as there is room for, and move the cursor with them.
-- The caller has stored the INIT payloads of draws cursor, cursor+1, …; what is not enqueued expires by itself.
-- include: bells, byte_count, cursors, events, memory_marks, numbers, open_lanes, room, waiting
-- KEYS[1] control      HASH*
-- KEYS[2] progress     HASH*    of the task
-- KEYS[3] ledger       HASH*    of the trainer
-- KEYS[4] completed    ZSET*    pool of the task
-- KEYS[5] jobs_eval    STREAM*
-- KEYS[6] jobs_resume  STREAM*
-- KEYS[7] jobs_fresh   STREAM*
-- KEYS[8] groups       prefix of the group records (HASH)
-- KEYS[9] archived     STRING   bitmap
-- KEYS[10] filtered    STRING   bitmap
-- KEYS[11] dropped     STRING   bitmap
-- KEYS[12] bell        LIST*    of the workers
-- KEYS[13] events      STREAM*
-- KEYS[14] bytes       HASH
-- KEYS[15] unpinned    SET
-- KEYS[16] leases      ZSET*
-- KEYS[17] cursors   HASH*    next draw by task
-- KEYS[18+] payload  STRING x0..128  INIT payload of each draw; none in a cluster
-- ARGV[1] nonce     token          of the producer
-- ARGV[2] operation token          nonce of this call
-- ARGV[3] task      name
-- ARGV[4] lane      fresh|eval
-- ARGV[5] cursor    0..33_554_432  that the caller expects
-- ARGV[6] target    ''|0..         groups in all that the task may have started or used; '' = the one in progress
-- ARGV[7] threshold ''|0..         stale threshold in steps; '' = groups of this task do not age
-- ARGV[8] mark      0..            payload bytes of the run from which nothing is started; 0 = no bound
-- ARGV[9] most      ''|1..         groups of the task in flight at most; '' = no bound
-- ARGV[10] patience ''|1..         failures in a row after which nothing is started; '' = no bound
-- ARGV[11+] samples, size  0..4096, 0..1_048_576 x0..128  of each draw: rollouts, 0 = the prompt cannot be used, count it
--                   as dropped; bytes of its INIT payload, where that is not given
-- replies OK enqueued cursor | FENCED | CURSOR cursor | CLOSED mode | FULL held mark | STOPPED failures | NO_PAYLOAD gid
-- keeps I1, I3 (compare-and-set in the step that enqueues), I12 (new prompts only below the low mark), I13 (operation)
local control, progress, ledger, completed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local jobs_eval, jobs_resume, jobs_fresh, groups = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local archived, filtered, dropped, bell, events = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local bytes, unpinned, leases, cursors = KEYS[14], KEYS[15], KEYS[16], KEYS[17]
local nonce, operation, task, lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local expected, target, threshold = num(ARGV[5]), ARGV[6], ARGV[7]
local mark, most, patience, draws = num(ARGV[8]), ARGV[9], ARGV[10], (#ARGV - 10) / 2

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
local done = redis.call('HMGET', progress, 'enqueue_op', 'enqueue_count', 'target')
local cursor = next_draw(cursors, progress, task)
if done[1] == operation then return {'OK', num(done[2]), int(cursor)} end
if cursor ~= expected then return {'CURSOR', int(cursor)} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
local jobs, waiting, held = lane == 'eval' and jobs_eval or jobs_fresh, 0, held_bytes(bytes)
for _, stream in ipairs({jobs_eval, jobs_resume, jobs_fresh}) do waiting = waiting + redis.call('XLEN', stream) end
if is_full(bytes, mark) and (waiting > 0 or is_refused(bytes, mark, leases, ledger)) then
  return {'FULL', int(held), int(mark)}
end
local failures = too_many_failures(progress, patience)
if failures then return {'STOPPED', int(failures)} end
if target == '' then target = done[3] or '0' end
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, ledger, num(target), threshold, most)
local function prompt_bytes(i) return KEYS[17 + i] and redis.call('STRLEN', KEYS[17 + i]) or num(ARGV[10 + 2 * i]) end
for i = 1, draws do
  if num(ARGV[9 + 2 * i]) > 0 and (prompt_bytes(i) == 0 or #KEYS > 17 and #KEYS - 17 ~= draws) then
    return {'NO_PAYLOAD', string.format('%s-%010d', task, cursor + i - 1)}
  end
end

-- this first: who may not write it (ACL) is stopped before anything has come in
redis.call('HSET', cursors, task, int(cursor))
local enqueued, drawn, came = 0, 0, 0
for i = 1, draws do
  if enqueued >= free or (enqueued > 0 and mark > 0 and held + came >= mark) then break end
  local draw = cursor + i - 1
  local gid = string.format('%s-%010d', task, draw)
  local record, samples = groups .. gid, num(ARGV[9 + 2 * i])
  local ended = redis.call('GETBIT', archived, draw) + redis.call('GETBIT', filtered, draw) + redis.call('GETBIT', dropped, draw)
  -- after a loss the same draws come again: what came in before the cursor did is passed over
  if ended > 0 or redis.call('EXISTS', record) == 1 then
    redis.call('HINCRBY', progress, 'ahead', -1)
  else
    redis.call('HINCRBY', progress, 'enqueued', 1)
    if samples == 0 then
      redis.call('SETBIT', dropped, draw, 1)
      redis.call('HINCRBY', progress, 'dropped', 1)
    else
      local size = prompt_bytes(i)
      if KEYS[17 + i] then redis.call('PERSIST', KEYS[17 + i]) else redis.call('SADD', unpinned, gid .. ' init 1') end
      -- a record is searched from its beginning: what a take reads and writes of 512 of them comes first
      redis.call('HSET', record, 'payload', 'init', 'chunks', 1, 'size', size, 'crc', '',
        'samples', samples, 'version', '', 'stage', 'waiting', 'status', 'init', 'task', task, 'draw', int(draw),
        'tries', 0, 'aborts', 0, 'prompt', size)
      came = came + size
      to_waiting(jobs, record, gid, lane, 'init')
      enqueued = enqueued + 1
    end
  end
  drawn = i
end
move_cursor(cursors, progress, task, cursor + drawn)
redis.call('HSET', progress, 'target', target, 'enqueue_op', operation, 'enqueue_count', enqueued)
count_bytes(bytes, came, 0)
if enqueued > 0 then
  ring(bell, enqueued)
  log_event(events, 'enqueued', 'task', task, 'groups', enqueued, 'cursor', int(cursor + drawn))
end
return {'OK', enqueued, int(cursor + drawn)}
