-- expiry: expire_group, for a group that waits or runs and can serve no train step any more.
-- include: byte_count, numbers

-- Put a group back to its prompt, in the pool of expired groups, or drop it; its lease or job is gone. Return where it is.
local function expire_group(keys, gid, retryable)
  local held = redis.call('HMGET', keys.record, 'payload', 'chunks', 'size', 'prompt', 'draw')
  local went = 0
  if held[1] ~= 'init' then
    redis.call('SADD', keys.garbage, gid .. ' ' .. held[1] .. ' ' .. held[2])
    went = num(held[3])
  end
  redis.call('HINCRBY', keys.progress, 'expirations', 1)
  if not retryable then
    redis.call('SADD', keys.garbage, gid .. ' init 1')
    redis.call('SETBIT', keys.dropped, held[5], 1)
    redis.call('HINCRBY', keys.progress, 'dropped', 1)
    redis.call('UNLINK', keys.record)
    count_bytes(keys.bytes, 0, went + num(held[4]))
    return 'dropped'
  end
  local arrival = string.format('%010d', redis.call('HINCRBY', keys.progress, 'arrivals', 1))
  redis.call('HDEL', keys.record, 'lane', 'entry', 'claimed_ms')
  redis.call('HSET', keys.record, 'stage', 'pool', 'status', 'expired', 'token', '', 'owner', '', 'arrival', arrival,
    'payload', 'init', 'chunks', 1, 'size', num(held[4]), 'crc', '', 'version', '', 'lineage', '', 'tokens', 0)
  redis.call('ZADD', keys.expired, '+inf', arrival .. ':' .. gid)
  count_bytes(keys.bytes, 0, went)
  return 'pool'
end
