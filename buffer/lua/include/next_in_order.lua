-- next_in_order: the groups that a take gets from a pool.

-- Return up to `count` members of a pool, none older than the cut (I8). staleness: the oldest weights first. fifo: the
-- first arrivals. The members of one version are in order of arrival, so the first of each version are merged; of more
-- than 64 versions, the newer ones wait.
local function next_in_order(order, pool, cut, count)
  if order == 'staleness' then return redis.call('ZRANGEBYSCORE', pool, cut, '+inf', 'LIMIT', 0, count) end
  local chosen, from = {}, cut
  for _ = 1, 64 do
    local member, version = unpack(redis.call('ZRANGEBYSCORE', pool, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
    if not member then break end
    if #chosen < count or member < chosen[count] then
      for _, each in ipairs(redis.call('ZRANGEBYSCORE', pool, version, version, 'LIMIT', 0, count)) do
        chosen[#chosen + 1] = each
      end
      table.sort(chosen)
      for i = #chosen, count + 1, -1 do chosen[i] = nil end
    end
    from = '(' .. version
  end
  return chosen
end
