#!lua flags=no-writes
-- counts: what the pools of some tasks hold for the next train step, at one instant. Costs O(log N) per pool.
-- include: numbers
-- KEYS[1] ledger     HASH
-- KEYS[2+] completed, aborted, expired  ZSET, ZSET, ZSET x0..256  of each task
-- ARGV[1+] threshold  ''|0.. xKEYS  of each task: stale threshold in steps; '' = its groups do not age
-- replies OK, then 4 numbers per task: completed and aborted that are not too old, expired, too old and not moved yet
-- keeps I8 (does not rely on refresh)
local step = num(redis.call('HGET', KEYS[1], 'taken')) + 1
local reply = {'OK'}
for i = 2, #KEYS, 3 do
  local threshold = ARGV[(i + 1) / 3]
  local cut = threshold == '' and '-inf' or int(step - tonumber(threshold))
  local completed, aborted = redis.call('ZCOUNT', KEYS[i], cut, '+inf'), redis.call('ZCOUNT', KEYS[i + 1], cut, '+inf')
  local all = redis.call('ZCARD', KEYS[i]) + redis.call('ZCARD', KEYS[i + 1])
  for _, count in ipairs({completed, aborted, redis.call('ZCARD', KEYS[i + 2]), all - completed - aborted}) do
    reply[#reply + 1] = count
  end
end
return reply
