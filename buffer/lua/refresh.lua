#!lua flags=allow-oom
-- refresh: move groups that the next train step may no longer use out of a pool. Costs O(log N + moved).
-- include: bells, byte_count, events, numbers, pool_records
-- KEYS[1] ledger     HASH*
-- KEYS[2] pool       ZSET*    completed or aborted
-- KEYS[3] expired    ZSET     pool of the task
-- KEYS[4] progress   HASH     of the task
-- KEYS[5] groups     prefix of the group records (HASH)
-- KEYS[6] dropped    STRING   bitmap
-- KEYS[7] garbage    SET
-- KEYS[8] bell       LIST*    of the producer
-- KEYS[9] events     STREAM*
-- KEYS[10] order     ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[11] bytes     HASH
-- ARGV[1] threshold 0..     stale threshold in steps
-- ARGV[2] limit     1..250  groups at most
-- ARGV[3] retryable 0|1     1 = to the pool of expired groups, from their prompt again; 0 = dropped
-- replies OK moved
-- keeps I1, I8 (take does not rely on it), I12 (frees), I13 (repeating it finds nothing)
local ledger, pool, expired, progress, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local dropped, garbage, bell, events, order, bytes = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local threshold, limit, retryable = num(ARGV[1]), num(ARGV[2]), ARGV[3] == '1'

local step = num(redis.call('HGET', ledger, 'taken')) + 1
local members = redis.call('ZRANGEBYSCORE', pool, '-inf', '(' .. int(step - threshold), 'LIMIT', 0, limit)
local freed, went = {}, 0
local gids, records = records_of(groups, members, 'payload', 'chunks', 'draw', 'size', 'prompt')
for i, member in ipairs(members) do
  local gid, record = gids[i], records[i]
  freed[#freed + 1] = gid .. ' ' .. record[1] .. ' ' .. record[2]
  went = went + num(record[4])
  if retryable then
    redis.call('ZADD', expired, '+inf', member)
    redis.call('HSET', groups .. gid, 'status', 'expired', 'payload', 'init', 'chunks', 1, 'size', num(record[5]), 'crc', '',
      'version', '', 'lineage', '', 'tokens', 0)
  else
    freed[#freed + 1] = gid .. ' init 1'
    went = went + num(record[5])
    redis.call('SETBIT', dropped, record[3], 1)
    redis.call('UNLINK', groups .. gid)
  end
end
if #members > 0 then
  redis.call('ZREM', pool, unpack(members))
  redis.call('ZREM', order, unpack(members))
  redis.call('SADD', garbage, unpack(freed))
  count_bytes(bytes, 0, went)
  redis.call('HINCRBY', progress, 'expirations', #members)
  if not retryable then redis.call('HINCRBY', progress, 'dropped', #members) end
  ring(bell, 1)
  log_event(events, 'expired', 'groups', #members, 'step', int(step), 'retry', ARGV[3])
end
return {'OK', #members}
