#!lua flags=allow-oom
-- refresh: move groups that the next train step may no longer use out of a pool. Costs O(log N + moved).
-- KEYS[1] ledger     HASH
-- KEYS[2] pool       ZSET     completed or aborted
-- KEYS[3] expired    ZSET     pool of the task
-- KEYS[4] progress   HASH     of the task
-- KEYS[5] groups     prefix of the group records (HASH)
-- KEYS[6] dropped    STRING   bitmap
-- KEYS[7] garbage    SET
-- KEYS[8] bell       LIST     of the producer
-- KEYS[9] events     STREAM
-- KEYS[10] order     ZSET     of the completed groups of the task, where the policy needs one
-- ARGV[1] threshold  stale threshold in steps
-- ARGV[2] limit      groups at most
-- ARGV[3] retryable  1 = to the pool of expired groups, from their prompt again; 0 = dropped
-- replies OK moved
-- keeps I1, I8 (take does not rely on it), I13 (repeating it finds nothing)
local ledger, pool, expired, progress, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local dropped, garbage, bell, events, order = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local threshold, limit, retryable = num(ARGV[1]), num(ARGV[2]), ARGV[3] == '1'

local step = num(redis.call('HGET', ledger, 'taken')) + 1
local members = redis.call('ZRANGEBYSCORE', pool, '-inf', '(' .. int(step - threshold), 'LIMIT', 0, limit)
for _, member in ipairs(members) do
  local gid = string.match(member, ':(.*)$')
  local record = redis.call('HMGET', groups .. gid, 'payload', 'chunks', 'draw')
  redis.call('ZREM', pool, member)
  redis.call('ZREM', order, member)
  redis.call('SADD', garbage, gid .. ' ' .. record[1] .. ' ' .. record[2])
  redis.call('HINCRBY', progress, 'expirations', 1)
  if retryable then
    redis.call('ZADD', expired, '+inf', member)
    -- size 0: not known here; the prompt's bytes are not those of the result
    redis.call('HSET', groups .. gid, 'status', 'expired', 'payload', 'init', 'chunks', 1, 'size', 0, 'crc', '',
      'version', '', 'lineage', '', 'tokens', 0)
  else
    redis.call('SADD', garbage, gid .. ' init 1')
    redis.call('SETBIT', dropped, record[3], 1)
    redis.call('HINCRBY', progress, 'dropped', 1)
    redis.call('UNLINK', groups .. gid)
  end
end
if #members > 0 then
  ring(bell, 1)
  log_event(events, 'expired', 'groups', #members, 'step', int(step), 'retry', ARGV[3])
end
return {'OK', #members}
