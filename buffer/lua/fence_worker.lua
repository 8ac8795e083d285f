#!lua flags=allow-oom
-- fence_worker: a worker did not answer; revoke what it holds, so that nobody waits for it. The caller repeats it until
-- nothing is left.
-- include: bells, events, numbers, retries
-- KEYS[1] leases       ZSET
-- KEYS[2] groups       prefix of the group records (HASH)
-- KEYS[3] holds        SET      gids that the worker holds
-- KEYS[4] workers      ZSET
-- KEYS[5] worker       HASH     record of the worker
-- KEYS[6] dead         ZSET
-- KEYS[7] dead_letters prefix of the reasons (STRING)
-- KEYS[8] bell_workers LIST
-- KEYS[9] bell_producer LIST
-- KEYS[10] events      STREAM
-- KEYS[11] jobs        prefix of the waiting lines (STREAM)
-- KEYS[12] progress    prefix of the tasks' accounts (HASH)
-- ARGV[1] worker    name          id
-- ARGV[2] max_tries 1..1_000_000
-- ARGV[3] limit     1..200        groups at most
-- replies OK revoked left
-- keeps I1, I2, I10 (nobody waits for the dead), I13 (repeating it finds nothing)
local leases, groups, holds, workers, worker = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local dead, dead_letters, bell_workers, bell_producer, events = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local jobs, progress = KEYS[11], KEYS[12]
local id, max_tries, limit = ARGV[1], num(ARGV[2]), num(ARGV[3])

-- all that may be written under a prefix is read first: of a wrong type, it stops the script before it writes
local held, found, tasks = redis.call('SRANDMEMBER', holds, limit), {}, {}
for i, gid in ipairs(held) do
  local task = redis.call('HGET', groups .. gid, 'task')
  if task then tasks[task] = tasks[task] or retry_keys(task, groups, jobs, progress, dead, dead_letters) end
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
    local place = retry_or_bury(keys, gid, max_tries, '{"reason":"worker fenced","worker":"' .. id .. '"}')
    if place == 'dead' then buried = buried + 1 else waiting = waiting + 1 end
  end
end
redis.call('ZREM', workers, id)
redis.call('UNLINK', worker)
if waiting > 0 then ring(bell_workers, waiting) end
-- what is buried makes room for another group
if buried > 0 then ring(bell_producer, 1) end
log_event(events, 'worker_fenced', 'worker', id, 'groups', waiting + buried)
return {'OK', waiting + buried, redis.call('SCARD', holds)}
