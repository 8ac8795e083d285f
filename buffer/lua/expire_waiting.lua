#!lua flags=allow-oom
-- expire_waiting: move groups out of the queue whose tokens became too old while they waited. Those of the index that run
-- are ended by their workers (heartbeat.lua). Costs O(log N + those that are too old).
-- KEYS ledger        HASH*    of the trainer
-- KEYS age_index     ZSET*    groups of the task that wait or run, by their oldest version
-- KEYS queues        prefix   of the queues (STREAM)
-- KEYS expired       ZSET     pool of the task
-- KEYS progress      HASH     of the task
-- KEYS groups        prefix   of the group records (HASH)
-- KEYS dropped       STRING   bitmap
-- KEYS garbage       SET
-- KEYS bytes         HASH
-- KEYS bell_producer LIST*    of the producer
-- KEYS events        STREAM*
-- ARGV task      name
-- ARGV threshold 0..     stale threshold in steps
-- ARGV retryable 0|1     1 = to the pool of expired groups, which start again from their prompt; 0 = dropped
-- ARGV passed    0..     number of the oldest groups that are passed over, since they run
-- ARGV limit     1..250  largest number of groups that are read
-- replies OK moved running (of those that were read)
-- keeps I1, I8, I12 (frees), I13 (a repeated call finds nothing)

local step = next_step(ledger)
local cut = step - threshold
local gids = redis.call('ZRANGEBYSCORE', age_index, '-inf', '(' .. int(cut), 'LIMIT', passed, limit)
local waiting = {}
for _, gid in ipairs(gids) do
  local record = redis.call('HMGET', groups .. gid, 'stage', 'entry', 'tokens', 'lane')
  if record[1] == 'waiting' then
    local one = {gid = gid, entry = record[2], tokens = num(record[3]), jobs = queues .. task .. ':' .. record[4]}
    redis.call('XLEN', one.jobs)
    waiting[#waiting + 1] = one
  end
end
local tokens = 0
for _, one in ipairs(waiting) do
  redis.call('XDEL', one.jobs, one.entry)
  redis.call('ZREM', age_index, one.gid)
  expire_group({record = groups .. one.gid, progress = progress, expired = expired, dropped = dropped, garbage = garbage,
    bytes = bytes}, one.gid, retryable, cut)
  tokens = tokens + one.tokens
end
if #waiting > 0 then
  redis.call('HINCRBY', progress, 'ended_early', #waiting)
  redis.call('HINCRBY', progress, 'discarded_tokens', int(tokens))
  wake(bell_producer, 1)
  log_event(events, 'expired', 'groups', #waiting, 'step', int(step), 'retry', retryable and 1 or 0)
end
return {'OK', #waiting, #gids - #waiting}
