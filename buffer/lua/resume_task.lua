#!lua flags=allow-oom
-- resume_task: let a stopped task start groups again, after its cause was fixed.
-- KEYS progress HASH*, bell_producer LIST*, events STREAM*
-- ARGV task name
-- replies OK
-- keeps I13 (a repeated call finds none)

local counts = redis.call('HMGET', progress, 'failures_in_row', 'filtered_in_row', 'halt', 'stopped', 'produced_groups',
  'skipped')
local failures = num(counts[1]) + num(counts[2])
if failures > 0 or counts[3] == 'broken' or counts[4] then
  redis.call('HSET', progress, 'failures_in_row', 0, 'filtered_in_row', 0,
    'skips_from', int(num(counts[5]) + num(counts[6])))
  redis.call('HDEL', progress, 'stopped', 'error', 'error_ms')
  if counts[3] == 'broken' then redis.call('HSET', progress, 'halt', '') end
  wake(bell_producer, 1)
  log_event(events, 'task_resumed', 'task', task, 'failures', int(failures))
end
return {'OK'}
