#!lua flags=allow-oom
-- fence_worker: a worker did not answer; revoke all that it holds in one step, so that nobody waits for it.
-- KEYS[1] leases       ZSET
-- KEYS[2] groups       prefix of the group records (HASH)
-- KEYS[3] holds        SET      gids that the worker holds
-- KEYS[4] workers      ZSET
-- KEYS[5] worker       HASH     record of the worker
-- KEYS[6] dead         ZSET
-- KEYS[7] dead_letters prefix of the reasons (STRING)
-- KEYS[8] bell_workers LIST
-- KEYS[9] events       STREAM
-- KEYS[10+] jobs_resume, jobs_eval, progress  (STREAM, STREAM, HASH) of each task
-- ARGV[1] worker       id
-- ARGV[2] max_tries
-- ARGV[3] limit        groups at most; more than that is refused
-- ARGV[4+] task        name of each triple
-- replies OK revoked | TOO_MANY held
-- keeps I1, I2, I10 (nobody waits for the dead), I13 (repeating it finds nothing)
local leases, groups, holds, workers, worker = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local dead, dead_letters, bell_workers, events = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local id, max_tries, limit = ARGV[1], num(ARGV[2]), num(ARGV[3])
local held = redis.call('SCARD', holds)
if held > limit then return {'TOO_MANY', held} end

local tasks, revoked = {}, 0
for i = 4, #ARGV do
  local first = 10 + (i - 4) * 3
  tasks[ARGV[i]] = {groups = groups, jobs_resume = KEYS[first], jobs_eval = KEYS[first + 1],
    progress = KEYS[first + 2], dead = dead, dead_letters = dead_letters}
end
for _, gid in ipairs(redis.call('SRANDMEMBER', holds, limit)) do
  local keys = tasks[redis.call('HGET', groups .. gid, 'task')]
  if keys then
    redis.call('ZREM', leases, gid)
    redis.call('SREM', holds, gid)
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
    retry_or_bury(keys, gid, max_tries, '{"reason":"worker fenced","worker":"' .. id .. '"}')
    revoked = revoked + 1
  end
end
redis.call('ZREM', workers, id)
redis.call('UNLINK', worker)
if revoked > 0 then ring(bell_workers, revoked) end
log_event(events, 'worker_fenced', 'worker', id, 'groups', revoked)
return {'OK', revoked}
