#!lua flags=allow-oom
-- fence_worker: revoke what a silent worker holds, so that no process waits for it. The caller repeats it until
-- nothing is left.
-- include: bells, events, retries
-- KEYS leases        ZSET
-- KEYS groups        prefix  of the group records (HASH)
-- KEYS holds         SET     gids that the worker holds
-- KEYS workers       ZSET
-- KEYS worker_record HASH    record of the worker
-- KEYS dead          ZSET
-- KEYS dead_letters  prefix  of the reasons (STRING)
-- KEYS bell_workers  LIST
-- KEYS bell_producer LIST
-- KEYS events        STREAM
-- KEYS queues        prefix  of the queues (STREAM)
-- KEYS accounts      prefix  of the tasks' accounts (HASH)
-- KEYS ages          prefix  of the age indexes (ZSET)
-- ARGV worker    name          id
-- ARGV max_tries 1..1_000_000
-- ARGV limit     1..200        largest number of groups
-- replies OK revoked left
-- keeps I1, I2, I10 (no process waits for a dead worker), I13 (a repeated call finds nothing)

-- all keys with a prefix are read first: a wrong type stops the script before it writes
local held, found, tasks = redis.call('SRANDMEMBER', holds, limit), {}, {}
for i, gid in ipairs(held) do
  local task = redis.call('HGET', groups .. gid, 'task')
  if task then tasks[task] = tasks[task] or retry_keys(task, groups, queues, accounts, ages, dead, dead_letters) end
  found[i] = tasks[task]
end
local waiting, buried = 0, 0
for i, gid in ipairs(held) do
  local keys = found[i]
  redis.call('ZREM', leases, gid)
  redis.call('SREM', holds, gid)
  if keys then
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
    local place = retry_or_bury(keys, gid, max_tries, '{"reason":"worker fenced","worker":"' .. worker .. '"}')
    if place == 'dead' then buried = buried + 1 else waiting = waiting + 1 end
  end
end
redis.call('ZREM', workers, worker)
redis.call('UNLINK', worker_record)
if waiting > 0 then ring(bell_workers, waiting) end
-- a dead letter makes room for another group
if buried > 0 then ring(bell_producer, 1) end
log_event(events, 'worker_fenced', 'worker', worker, 'groups', waiting + buried)
return {'OK', waiting + buried, redis.call('SCARD', holds)}
