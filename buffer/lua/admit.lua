#!lua flags=allow-oom
-- admit: a worker that was barred for what it handed in may claim again, and its account begins anew.
-- include: bells, events, numbers
-- KEYS[1] suspects  HASH     "since_ms bad barred_ms" by worker
-- KEYS[2] bell      LIST*    of the workers
-- KEYS[3] events    STREAM*
-- ARGV[1] worker    name     id
-- replies OK bad
-- keeps I13 (repeating it finds nothing)
local suspects, bell, events, worker = KEYS[1], KEYS[2], KEYS[3], ARGV[1]

local bad = string.match(redis.call('HGET', suspects, worker) or '', '^%d+ (%d+) ')
if bad then
  redis.call('HDEL', suspects, worker)
  ring(bell, 1)
  log_event(events, 'worker_admitted', 'worker', worker, 'groups', bad)
end
return {'OK', num(bad)}
