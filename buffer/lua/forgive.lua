#!lua flags=allow-oom
-- forgive: reset the count of failures of a task, so that it is started again after its cause was fixed.
-- include: bells, events, numbers
-- KEYS progress      HASH*    of the task
-- KEYS bell_producer LIST*    of the producer
-- KEYS events        STREAM*
-- ARGV task name
-- replies OK
-- keeps I13 (a repeated call finds none)

local failures = num(redis.call('HGET', progress, 'failures_in_row'))
local is_broken = redis.call('HGET', progress, 'halt') == 'broken'
if failures > 0 or is_broken then
  redis.call('HSET', progress, 'failures_in_row', 0)
  if is_broken then redis.call('HSET', progress, 'halt', '') end
  ring(bell_producer, 1)
  log_event(events, 'forgiven', 'task', task, 'failures', int(failures))
end
return {'OK'}
