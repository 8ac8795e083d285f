#!lua flags=allow-oom
-- admit: a worker that was barred for what it handed in may claim again, and its account begins anew.
-- include: bells, events, numbers
-- KEYS suspects     HASH     "since_ms bad barred_ms" by worker
-- KEYS bell_workers LIST*    of the workers
-- KEYS events       STREAM*
-- ARGV worker name  id
-- replies OK bad
-- keeps I13 (repeating it finds nothing)

local bad = string.match(redis.call('HGET', suspects, worker) or '', '^%d+ (%d+) ')
if bad then
  redis.call('HDEL', suspects, worker)
  ring(bell_workers, 1)
  log_event(events, 'worker_admitted', 'worker', worker, 'groups', bad)
end
return {'OK', num(bad)}
