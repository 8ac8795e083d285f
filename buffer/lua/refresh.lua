#!lua flags=allow-oom
-- refresh: move groups that the next train step may not use out of a pool. Costs O(log N + moved).
-- KEYS ledger        HASH*
-- KEYS pool          ZSET*    completed or aborted
-- KEYS expired       ZSET     pool of the task
-- KEYS progress      HASH     of the task
-- KEYS groups        prefix   of the group records (HASH)
-- KEYS dropped       STRING   bitmap
-- KEYS garbage       SET
-- KEYS bell_producer LIST*    of the producer
-- KEYS events        STREAM*
-- KEYS bytes         HASH
-- ARGV threshold 0..     stale threshold in steps
-- ARGV limit     1..250  largest number of groups
-- ARGV retryable 0|1     1 = to the pool of expired groups, whose members older than `cut` start again; 0 = dropped
-- replies OK moved
-- keeps I1, I8 (take does not rely on it), I12 (frees), I13 (a repeated call finds nothing)

local step = next_step(ledger)
local cut = int(step - threshold)
local found = redis.call('ZRANGEBYSCORE', pool, '-inf', '(' .. cut, 'LIMIT', 0, limit)
local freed, went, expired_members, ended = {}, 0, {}, {}
local gids, records, members = records_of(groups, found, 'payload', 'chunks', 'draw', 'size', 'prompt', 'newest')
for i, member in ipairs(members) do
  local gid, record = gids[i], records[i]
  -- the worker that claims the group reads which members are older than the cut (I14)
  local keeps_bytes = retryable and record[6] and num(record[6]) >= tonumber(cut)
  if not keeps_bytes then
    freed[#freed + 1] = gid .. ' ' .. record[1] .. ' ' .. record[2]
    went = went + num(record[4])
  end
  if retryable then
    local prompt = {'payload', 'init', 'chunks', 1, 'size', num(record[5]), 'crc', '', 'tokens', 0}
    redis.call('HSET', groups .. gid, 'status', 'expired', 'version', '', 'lineage', '', 'cut', cut,
      unpack(keeps_bytes and {} or prompt))
    expired_members[2 * i - 1], expired_members[2 * i] = '+inf', member
  else
    freed[#freed + 1] = gid .. ' init 1'
    went = went + num(record[5])
    redis.call('SETBIT', dropped, record[3], 1)
    ended[i] = groups .. gid
  end
end
if #members > 0 then
  redis.call('ZREM', pool, unpack(members))
  if retryable then redis.call('ZADD', expired, unpack(expired_members)) else redis.call('UNLINK', unpack(ended)) end
  if #freed > 0 then redis.call('SADD', garbage, unpack(freed)) end
  count_bytes(bytes, 0, went)
  redis.call('HINCRBY', progress, 'expirations', #members)
  if not retryable then redis.call('HINCRBY', progress, 'dropped', #members) end
  wake(bell_producer, 1)
  log_event(events, 'expired', 'groups', #members, 'step', int(step), 'retry', retryable and 1 or 0)
end
return {'OK', #members}
