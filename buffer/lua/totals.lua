#!lua flags=no-writes
-- totals: count the groups of every task in each structure, and read each counter, at one instant.
-- KEYS leases ZSET, leased_by prefix, dead ZSET, bytes HASH
-- KEYS jobs_eval, jobs_resume, jobs_fresh, completed, aborted, expired, progress, archived, filtered, dropped, skipped  STREAM, STREAM, STREAM, ZSET, ZSET, ZSET, HASH, STRING, STRING, STRING, STRING x0..256  of each task
-- replies OK held dead came went, then 23 numbers per task: of TaskAccount (buffer/ledger/account.py), and of 4 bitmaps
-- keeps I1 (one instant for all), I12

local held = 0
for _, worker in ipairs(redis.call('ZRANGE', leases, 0, -1)) do held = held + held_count(leased_by .. worker) end
local reply = {'OK', held, redis.call('ZCARD', dead)}
local counts = redis.call('HMGET', bytes, 'came', 'went')
for k = 1, 2 do reply[#reply + 1] = int(num(counts[k])) end
for _, jobs_eval, jobs_resume, jobs_fresh, completed, aborted, expired, progress, archived, filtered, dropped, skipped in each_unit do
  local waiting, counters = 0, redis.call('HMGET', progress, 'running', 'taken', 'archived', 'dead', 'filtered', 'dropped',
    'skipped', 'enqueued', 'put', 'imported', 'cursor', 'reentered', 'highest_draw', 'target', 'consumed')
  for _, jobs in ipairs({jobs_eval, jobs_resume, jobs_fresh}) do waiting = waiting + redis.call('XLEN', jobs) end
  reply[#reply + 1], reply[#reply + 2] = waiting, num(counters[1])
  for _, pool in ipairs({completed, aborted, expired}) do reply[#reply + 1] = redis.call('ZCARD', pool) end
  for k = 2, 15 do reply[#reply + 1] = num(counters[k]) end
  for _, bitmap in ipairs({archived, filtered, dropped, skipped}) do reply[#reply + 1] = redis.call('BITCOUNT', bitmap) end
end
return reply
