#!lua flags=allow-oom
-- unbar_worker: let a barred worker claim again, and reset its count of bad groups.
-- KEYS bad_submissions HASH, bell_workers LIST*, events STREAM*
-- ARGV worker name  id
-- replies OK bad
-- keeps I13 (a repeated call finds nothing)

local bad = string.match(redis.call('HGET', bad_submissions, worker) or '', '^%d+ (%d+) ')
if bad then
  redis.call('HDEL', bad_submissions, worker)
  wake(bell_workers, 1)
  log_event(events, 'worker_unbarred', 'worker', worker, 'groups', bad)
end
return {'OK', num(bad)}
