#!lua
-- enqueue: start the next draws of a data set, as many as there is room for, and move the cursor with them.
-- The caller has stored the INIT payloads of draws cursor, cursor+1, …; those that are not enqueued expire.
-- KEYS control HASH*, progress HASH*, ledger HASH*, completed ZSET*, age_index ZSET*, jobs_eval STREAM*
-- KEYS jobs_resume STREAM*, jobs_fresh STREAM*, groups prefix, ends prefix, dropped STRING
-- KEYS skipped STRING, skips LIST, bell_trainer LIST, bell_workers LIST*
-- KEYS events STREAM*, bytes HASH, leases ZSET*, cursors HASH*
-- KEYS prompts  STRING* x0..128  INIT payload of each draw
-- ARGV nonce     token          of the producer
-- ARGV operation token          nonce of this call
-- ARGV task      name
-- ARGV lane      fresh|eval
-- ARGV cursor    0..33_554_432  that the caller expects
-- ARGV target    ''|0..         total of groups that the task may have started or used, of an evaluation its last draw + 1; '' = the one in progress
-- ARGV threshold ''|0..         stale threshold in steps; '' = groups of this task do not age
-- ARGV byte_limit 0..            payload bytes of the run from which no group is started; 0 = no bound
-- ARGV max_in_flight ''|1..         largest number of groups of the task in flight; '' = no bound
-- ARGV most_skipped 0..64         of the newest 64 groups of the task; beyond it, it is stopped
-- ARGV samples   0..4096        x0..128  rollouts of each draw; 0 = its prompt cannot be used
-- ARGV letter    ''|text..4000  x0..128  JSON: why such a draw is skipped; '' = count it as dropped
-- replies OK enqueued cursor | FENCED | CURSOR cursor | CLOSED mode | FULL held byte_limit | STOPPED | NO_PAYLOAD gid
-- keeps I1, I3 (compare-and-set in the step that enqueues), I12 (new prompts only below the low mark), I13 (operation)

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
local done = redis.call('HMGET', progress, 'enqueue_op', 'enqueue_count', 'target')
local start = next_draw(cursors, task)
if done[1] == operation then return {'OK', num(done[2]), int(start)} end
if start ~= cursor then return {'CURSOR', int(start)} end
if not lane_is_open(control, lane) then return {'CLOSED', redis.call('HGET', control, 'mode')} end
local jobs, waiting, held = lane == 'eval' and jobs_eval or jobs_fresh, 0, held_bytes(bytes)
for _, stream in ipairs({jobs_eval, jobs_resume, jobs_fresh}) do waiting = waiting + redis.call('XLEN', stream) end
if is_full(bytes, byte_limit) and (waiting > 0 or is_refused(bytes, byte_limit, leases, ledger)) then
  return {'FULL', int(held), int(byte_limit)}
end
if redis.call('HEXISTS', progress, 'stopped') == 1 then return {'STOPPED'} end
target = target or num(done[3])
local free = room(progress, {jobs_eval, jobs_resume, jobs_fresh}, completed, age_index, ledger, target, threshold, max_in_flight,
  lane == 'eval' and start)
local gids, records, sizes = {}, {}, {}
for n, one in ipairs(units) do
  gids[n] = string.format('%s-%010d', task, start + n - 1)
  records[n] = groups .. gids[n]
  sizes[n] = prompts[n] and redis.call('STRLEN', prompts[n]) or 0
  if one.samples > 0 and sizes[n] == 0 then return {'NO_PAYLOAD', gids[n]} end
end
-- after a loss the same draws come again: those that exist already are skipped
local known, bitmaps = 0, ends .. task .. ':'
if #records > 0 then
  known = redis.call('EXISTS', unpack(records))
  for _, stage in ipairs(ENDS) do
    known = known + redis.call('BITCOUNT', bitmaps .. stage, start, start + #records - 1, 'BIT')
  end
end

-- first: a caller that may not write it (ACL) is stopped before anything is enqueued
redis.call('HSET', cursors, task, int(start))
local enqueued, unusable, made_no_sense, passed, came = 0, 0, 0, 0, 0
local skipping = {skipped = skipped, skips = skips, progress = progress, bell_trainer = bell_trainer, events = events}
for n, one in ipairs(units) do
  if enqueued >= free or (enqueued > 0 and byte_limit > 0 and held + came >= byte_limit) then break end
  local draw, record = start + n - 1, records[n]
  if known > 0 and (ended_stage(bitmaps, draw) or redis.call('EXISTS', record) == 1) then
    passed = passed + 1
  elseif one.letter ~= '' then
    skip_draw(skipping, task, draw, one.letter, most_skipped)
    made_no_sense = made_no_sense + 1
  elseif one.samples == 0 then
    redis.call('SETBIT', dropped, draw, 1)
    unusable = unusable + 1
  else
    redis.call('PERSIST', prompts[n])
    -- Redis searches a record from its beginning: fields that a take reads of each of its groups come first
    redis.call('HSET', record, 'payload', 'init', 'chunks', 1, 'size', sizes[n], 'crc', '', 'samples', one.samples,
      'version', '', 'stage', 'waiting', 'status', 'init', 'task', task, 'draw', int(draw), 'tries', 0, 'aborts', 0,
      'prompt', sizes[n], 'lane', lane, 'entry', add_job(jobs, gids[n], 'init'))
    came = came + sizes[n]
    enqueued = enqueued + 1
  end
end
local entered = enqueued + unusable + made_no_sense
local drawn = entered + passed
if entered > 0 then redis.call('HINCRBY', progress, 'enqueued', entered) end
if unusable > 0 then redis.call('HINCRBY', progress, 'dropped', unusable) end
if passed > 0 then redis.call('HINCRBY', progress, 'reentered', -passed) end
move_cursor(cursors, progress, task, start + drawn)
redis.call('HSET', progress, 'target', int(target), 'enqueue_op', operation, 'enqueue_count', enqueued)
count_bytes(bytes, came, 0)
if enqueued > 0 then
  wake(bell_workers, enqueued)
  log_event(events, 'enqueued', 'task', task, 'groups', enqueued, 'cursor', int(start + drawn))
end
return {'OK', enqueued, int(start + drawn)}
