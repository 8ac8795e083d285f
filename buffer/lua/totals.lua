#!lua flags=no-writes
-- totals: the account of every task at one instant: how many groups each structure holds, and each counter says.
-- include: numbers
-- KEYS[1] leases    ZSET
-- KEYS[2] dead      ZSET
-- KEYS[3] bytes     HASH
-- KEYS[4+] jobs_eval, jobs_resume, jobs_fresh, completed, aborted, expired, progress, archived, filtered, dropped  STREAM, STREAM, STREAM, ZSET, ZSET, ZSET, HASH, STRING, STRING, STRING x0..256  of each task
-- replies OK leases dead came went, then 24 numbers per task: 3 streams, 3 pools, 15 counters, 3 bitmaps
-- keeps I1 (one instant for all), I12
local reply = {'OK', redis.call('ZCARD', KEYS[1]), redis.call('ZCARD', KEYS[2])}
local bytes = redis.call('HMGET', KEYS[3], 'came', 'went')
for k = 1, 2 do reply[#reply + 1] = int(num(bytes[k])) end
for i = 4, #KEYS, 10 do
  for k = 0, 2 do reply[#reply + 1] = redis.call('XLEN', KEYS[i + k]) end
  for k = 3, 5 do reply[#reply + 1] = redis.call('ZCARD', KEYS[i + k]) end
  local counters = redis.call('HMGET', KEYS[i + 6], 'cursor', 'enqueued', 'target', 'consumed', 'running', 'judging',
    'taken', 'archived', 'dead', 'filtered', 'dropped', 'put', 'imported', 'ahead', 'reach')
  for k = 1, 15 do reply[#reply + 1] = num(counters[k]) end
  for k = 7, 9 do reply[#reply + 1] = redis.call('BITCOUNT', KEYS[i + k]) end
end
return reply
