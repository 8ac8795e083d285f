-- next_in_order: next_in_order and remove_taken, for groups that are taken in the order of the run's policy.

-- Return the next groups of a pool in the order of the run's policy, none older than the cut (I8); or an obstacle:
-- 'unordered' (the index lacks ready groups), 'blocked' (too many groups in it are too old). To peek, an index that no
-- take has settled yet is good enough.
local function next_in_order(policy, pool, order, progress, cut, count, glance)
  if policy == 'staleness' then return redis.call('ZRANGEBYSCORE', pool, cut, '+inf', 'LIMIT', 0, count) end
  if policy == 'freshest' then return redis.call('ZREVRANGEBYSCORE', pool, '+inf', cut, 'LIMIT', 0, count) end
  local by = redis.call('HGET', progress, 'order_by')
  local is_known = by == policy or (glance and not by)
  if not is_known or redis.call('ZCARD', order) ~= redis.call('ZCARD', pool) then
    if redis.call('ZCARD', pool) > 0 then return {}, 'unordered' end
  end
  local chosen, start, oldest = {}, 0, tonumber(cut) or -math.huge
  while #chosen < count do
    local members = redis.call('ZRANGE', order, start, start + 499)
    if #members == 0 then return chosen end
    if start > count + 2000 then return {}, 'blocked' end
    for i, version in ipairs(redis.call('ZMSCORE', pool, unpack(members))) do
      local is_young = version and (version == 'inf' or tonumber(version) >= oldest)
      if is_young and #chosen < count then chosen[#chosen + 1] = members[i] end
    end
    start = start + 500
  end
  return chosen
end

-- Remove taken groups from the pool and its index; the clock of length_fair advances to the last one.
local function remove_taken(pool, order, progress, members)
  if #members == 0 then return end
  if redis.call('ZCARD', order) > 0 then
    local round = tonumber(redis.call('ZSCORE', order, members[#members]) or '') or 0
    if round < math.huge and round > (tonumber(redis.call('HGET', progress, 'order_round') or '') or 0) then
      redis.call('HSET', progress, 'order_round', string.format('%.17g', round))
    end
    redis.call('ZREM', order, unpack(members))
  end
  redis.call('ZREM', pool, unpack(members))
end
