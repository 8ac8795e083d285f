#!lua flags=allow-oom
-- forgive: forget the failures of a task, so that it is started again after its cause was mended.
-- include: bells, events, numbers
-- KEYS[1] progress  HASH*    of the task
-- KEYS[2] bell      LIST*    of the producer
-- KEYS[3] events    STREAM*
-- ARGV[1] task      name
-- replies OK
-- keeps I13 (repeating it finds none)
local progress, bell, events, task = KEYS[1], KEYS[2], KEYS[3], ARGV[1]

local failures = num(redis.call('HGET', progress, 'failures_in_row'))
local is_broken = redis.call('HGET', progress, 'halt') == 'broken'
if failures > 0 or is_broken then
  redis.call('HSET', progress, 'failures_in_row', 0)
  if is_broken then redis.call('HSET', progress, 'halt', '') end
  ring(bell, 1)
  log_event(events, 'forgiven', 'task', task, 'failures', int(failures))
end
return {'OK'}
