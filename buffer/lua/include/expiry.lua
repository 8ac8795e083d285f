-- expiry: expire_group, for a group that waits or runs and can serve no train step any more.
-- include: byte_count, numbers

-- Put a group into the pool of expired groups, as refresh.lua does, or drop it; its lease or job is gone. It keeps its bytes
-- if some members are not older than `cut`. Return where it is.
local function expire_group(keys, gid, retryable, cut)
  local held = redis.call('HMGET', keys.record, 'payload', 'chunks', 'size', 'prompt', 'draw', 'newest')
  local went = 0
  local keeps_bytes = retryable and held[1] ~= 'init' and held[6] and num(held[6]) >= cut
  if held[1] ~= 'init' and not keeps_bytes then
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
    'version', '', 'lineage', '', 'cut', int(cut))
  if not keeps_bytes then
    redis.call('HSET', keys.record, 'payload', 'init', 'chunks', 1, 'size', num(held[4]), 'crc', '', 'tokens', 0)
  end
  redis.call('ZADD', keys.expired, '+inf', arrival .. ':' .. gid)
  count_bytes(keys.bytes, 0, went)
  return 'pool'
end
