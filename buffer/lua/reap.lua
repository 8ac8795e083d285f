#!lua flags=allow-oom
-- reap: take back the groups of silent workers, and forget workers that are long gone. Any process may call it.
-- include: bells, clock, events, grace, numbers, retries
-- KEYS clock          HASH
-- KEYS leases         ZSET
-- KEYS groups         prefix  of the group records (HASH)
-- KEYS holders        prefix  of the workers' holds (SET)
-- KEYS workers        ZSET
-- KEYS worker_records prefix  of the workers' records (HASH)
-- KEYS dead           ZSET
-- KEYS dead_letters   prefix  of the reasons (STRING)
-- KEYS bell_workers   LIST
-- KEYS bell_producer  LIST
-- KEYS events         STREAM
-- KEYS queues         prefix  of the queues (STREAM)
-- KEYS accounts       prefix  of the tasks' accounts (HASH)
-- KEYS ages           prefix  of the age indexes (ZSET)
-- ARGV lease_ms          1..86_400_000
-- ARGV limit             1..200         largest number of groups
-- ARGV max_tries         1..1_000_000
-- ARGV worker_timeout_ms 0..86_400_000  silence after which a worker is forgotten
-- replies OK reaped buried forgotten | GRACE left_ms
-- keeps I1, I2 (the token becomes invalid at once), I11 (no lease is lost to an outage); no leader, no lock (I13)

local now, lost, tasks = now_ms(), {}, {}
-- all keys with a prefix are read first: a wrong type stops the script before it writes
for i, gid in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', int(now), 'LIMIT', 0, limit)) do
  local record = redis.call('HMGET', groups .. gid, 'task', 'owner')
  local task, owner = record[1], record[2]
  if task then
    redis.call('SCARD', holders .. owner)
    tasks[task] = tasks[task] or retry_keys(task, groups, queues, accounts, ages, dead, dead_letters)
  end
  lost[i] = {gid = gid, owner = owner, keys = tasks[task]}
end
local silent = redis.call('ZRANGEBYSCORE', workers, '-inf', int(now - worker_timeout_ms), 'LIMIT', 0, 10)
for _, id in ipairs(silent) do redis.call('SCARD', holders .. id) end

local grace = tick(clock, now, lease_ms)
redis.call('HSET', clock, 'swept_ms', int(now))
-- deadlines further away than one lease were set before the clock was set back
for _, gid in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. int(now + lease_ms), '+inf', 'LIMIT', 0, limit)) do
  redis.call('ZADD', leases, int(now + lease_ms), gid)
end
if now < grace then return {'GRACE', int(grace - now)} end

local reaped, buried, forgotten = 0, 0, 0
for _, held in ipairs(lost) do
  local gid, owner, keys = held.gid, held.owner, held.keys
  redis.call('ZREM', leases, gid)
  -- a group without a record is lost (fsck reports it): its lease would block all others
  if keys then
    redis.call('SREM', holders .. owner, gid)
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
    local reason = '{"reason":"lease ran out","worker":"' .. owner .. '"}'
    local place = retry_or_bury(keys, gid, max_tries, reason)
    log_event(events, 'reaped', 'gid', gid, 'worker', owner, 'place', place)
    if place == 'dead' then buried = buried + 1 else reaped = reaped + 1 end
  end
end
for _, id in ipairs(silent) do
  -- a worker that still holds groups is forgotten once its leases have run out
  if redis.call('SCARD', holders .. id) == 0 then
    redis.call('ZREM', workers, id)
    redis.call('UNLINK', worker_records .. id)
    log_event(events, 'worker_lost', 'worker', id)
    forgotten = forgotten + 1
  end
end
if reaped > 0 then ring(bell_workers, reaped) end
if buried > 0 then ring(bell_producer, 1) end
return {'OK', reaped, buried, forgotten}
