#!lua flags=allow-oom
-- reap: end the registrations of silent workers that hold groups, take the groups back, and forget workers that are long
-- gone; or do this with one worker at once, so that no process waits for it. Any process may call it. A registration ends before its first group is taken, so that it cannot be renewed; what
-- one call leaves of it, the next one takes.
-- KEYS clock HASH, leases ZSET, groups prefix, leased_by prefix, workers ZSET, worker_records prefix
-- KEYS dead ZSET, dead_letters prefix, bell_workers LIST, bell_producer LIST, events STREAM, queues prefix
-- KEYS accounts prefix, ages prefix, worker_tokens_of prefix
-- ARGV worker            ''|name        only this one, although its lease runs; '' = all that are silent
-- ARGV lease_ms          1..86_400_000
-- ARGV limit             1..200         largest number of groups
-- ARGV max_tries         1..1_000_000
-- ARGV worker_timeout_ms 0..86_400_000  silence after which a worker is forgotten
-- replies OK reaped buried forgotten | GRACE left_ms
-- keeps I1, I2 (the token becomes invalid at once), I10 (no process waits for a dead worker), I11 (no lease is lost to an outage; one that is lost uses up a try unless its group has grown); no leader, no lock (I13)

local now, found = now_ms(), {}
local under = {groups = groups, queues = queues, accounts = accounts, ages = ages, dead = dead, dead_letters = dead_letters,
  leases = leases, leased_by = leased_by, events = events, bell_workers = bell_workers, bell_producer = bell_producer}
-- all keys with a prefix are read first: a wrong type stops the script before it writes
local silent, gone = {worker}, {worker}
if worker == '' then
  silent = redis.call('ZRANGEBYSCORE', leases, '-inf', int(now), 'LIMIT', 0, limit)
  gone = redis.call('ZRANGEBYSCORE', workers, '-inf', int(now - worker_timeout_ms), 'LIMIT', 0, 10)
end
for _, id in ipairs(silent) do
  redis.call('HLEN', worker_records .. id)
  redis.call('HLEN', worker_tokens_of .. id)
  for _, held in ipairs(held_groups(leased_by .. id)) do
    if #found < limit then found[#found + 1] = found_group(under, id, held[1], held[2]) end
  end
  if #found == limit then break end
end
for _, id in ipairs(gone) do
  redis.call('HLEN', leased_by .. id)
  redis.call('HLEN', worker_tokens_of .. id)
  redis.call('HLEN', worker_records .. id)
end

if worker == '' then
  local grace = tick(clock, now, lease_ms)
  redis.call('HSET', clock, 'seen_ms', int(now), 'swept_ms', int(now))
  -- deadlines further away than one lease were set before the clock was set back
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. int(now + lease_ms), '+inf', 'LIMIT', 0, limit)) do
    redis.call('ZADD', leases, int(now + lease_ms), id)
  end
  if now < grace then return {'GRACE', int(grace - now)} end
end

for _, ids in ipairs({silent, gone}) do
  for _, id in ipairs(ids) do settle_tokens(worker_tokens_of .. id, accounts) end
end
for _, one in ipairs(found) do redis.call('HDEL', worker_records .. one.worker, 'nonce', 'claim', 'claimed') end
local reaped, died = take_back(under, found, max_tries, worker == '' and 'lease ran out' or 'worker fenced')
for _, id in ipairs(silent) do
  -- with a digest that does not fit, the last group did not end the lease
  if held_count(leased_by .. id) == 0 then
    redis.call('UNLINK', leased_by .. id)
    redis.call('ZREM', leases, id)
  end
end
local forgotten = 0
for _, id in ipairs(gone) do
  -- a worker that still holds groups is forgotten once its lease has run out, or in the next call
  if held_count(leased_by .. id) == 0 then
    forget_worker(events, worker == '' and 'worker_lost' or 'worker_fenced', workers, id, worker_records .. id)
    forgotten = forgotten + 1
  end
end
return {'OK', reaped, died, forgotten}
