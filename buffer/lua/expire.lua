#!lua flags=allow-oom
-- expire: move groups that the next train step may not use out of a pool; or out of the queue, if their tokens became too
-- old while they waited. Those of the age index that run are ended by their workers (heartbeat.lua). Costs O(log N + read).
-- KEYS ledger HASH*
-- KEYS pool ZSET*    completed or aborted, or the age index of the task
-- KEYS queues prefix, expired ZSET*, progress HASH*, groups prefix, dropped STRING*, garbage SET*, bytes HASH*
-- KEYS bell_producer LIST*, events STREAM*
-- ARGV task      name
-- ARGV threshold 0..     stale threshold in steps
-- ARGV retryable 0|1     1 = to the pool of expired groups, whose members older than `cut` start again; 0 = dropped
-- ARGV passed    0..     number of the oldest groups that are passed over, since they run
-- ARGV limit     1..250  largest number of groups that are read
-- replies OK moved left (of those that were read)
-- keeps I1, I8 (take does not rely on it), I12 (frees), I13 (a repeated call finds nothing)

local step = next_step(ledger)
local cut = step - threshold
local found = redis.call('ZRANGEBYSCORE', pool, '-inf', '(' .. int(cut), 'LIMIT', passed, limit)
if #found == 0 then return {'OK', 0, 0} end
-- read here, before anything is written: most calls find nothing
redis.call('HLEN', progress)
redis.call('HLEN', bytes)
for key, length in pairs({[expired] = 'ZCARD', [dropped] = 'STRLEN', [garbage] = 'SCARD'}) do redis.call(length, key) end
local gids, records, members = records_of(groups, found, unpack(EXPIRING))
local leaving, pooled, waited, tokens = {}, {}, {}, 0
for i, gid in ipairs(gids) do
  local one = {gid = gid, held = records[i]}
  if members[i] ~= gid then
    one.arrival = string.sub(members[i], 1, -#gid - 2)
    pooled[#pooled + 1], leaving[#leaving + 1] = members[i], one
  else
    local stage, lane, entry, length = unpack(redis.call('HMGET', groups .. gid, 'stage', 'lane', 'entry', 'tokens'))
    if stage == 'waiting' then
      local jobs = queues .. task .. ':' .. lane
      redis.call('XLEN', jobs)
      waited[#waited + 1], leaving[#leaving + 1] = {jobs = jobs, entry = entry, gid = gid}, one
      tokens = tokens + num(length)
    end
  end
end
if #leaving == 0 then return {'OK', 0, #found} end

if #pooled > 0 then redis.call('ZREM', pool, unpack(pooled)) end
for _, one in ipairs(waited) do
  redis.call('XDEL', one.jobs, one.entry)
  redis.call('ZREM', pool, one.gid)
end
if #waited > 0 then
  redis.call('HINCRBY', progress, 'ended_early', #waited)
  redis.call('HINCRBY', progress, 'discarded_tokens', int(tokens))
end
expire_groups({groups = groups, progress = progress, expired = expired, dropped = dropped, garbage = garbage, bytes = bytes},
  leaving, retryable, cut)
wake(bell_producer, 1)
log_event(events, 'expired', 'groups', #leaving, 'step', int(step), 'retry', retryable and 1 or 0)
return {'OK', #leaving, #found - #leaving}
