#!lua flags=no-writes
-- counts: count the groups in the pools of some tasks for the next train step, at one instant. Costs O(log N) per pool.
-- KEYS ledger HASH
-- KEYS completed, aborted, expired  ZSET, ZSET, ZSET x0..256  of each task
-- ARGV threshold  ''|0.. xKEYS  of each task: stale threshold in steps; '' = no limit
-- replies OK, then 4 numbers per task: completed and aborted ones that are not too old, expired ones, too old ones that are not moved yet
-- keeps I8 (does not rely on refresh)

local step = next_step(ledger)
local reply = {'OK'}
for _, completed, aborted, expired, threshold in each_unit do
  local cut = threshold and int(step - threshold) or '-inf'
  local ready, begun = redis.call('ZCOUNT', completed, cut, '+inf'), redis.call('ZCOUNT', aborted, cut, '+inf')
  local all = redis.call('ZCARD', completed) + redis.call('ZCARD', aborted)
  for _, count in ipairs({ready, begun, redis.call('ZCARD', expired), all - ready - begun}) do
    reply[#reply + 1] = count
  end
end
return reply
