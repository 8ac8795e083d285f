-- earlier_counts: keep_counts, which lets readers compute a task's shares over its newest groups.

-- Keep these counts of a task each time that about 128 more of its groups were produced (one call may produce several),
-- and those kept before: the difference of now and `counts_before` is that of the newest 128 to 256 groups.
local function keep_counts(progress, before, produced)
  if math.floor(before / 128) == math.floor(produced / 128) then return end
  local names = {'produced_groups', 'filtered', 'dead', 'expirations', 'consumed', 'raw_rewards_count', 'truncated',
    'unparsed'}
  local found = redis.call('HMGET', progress, 'counts_kept', unpack(names))
  for i, name in ipairs(names) do names[i] = name .. '=' .. (found[i + 1] or 0) end
  redis.call('HSET', progress, 'counts_before', found[1] or '', 'counts_kept', table.concat(names, ' '))
end
