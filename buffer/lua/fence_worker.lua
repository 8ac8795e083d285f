#!lua flags=allow-oom
-- fence_worker: revoke what a silent worker holds, so that no process waits for it. The caller repeats it until
-- nothing is left.
-- KEYS leases ZSET, groups prefix, leased_by prefix, workers ZSET, worker_record HASH, dead ZSET
-- KEYS dead_letters prefix, bell_workers LIST, bell_producer LIST, events STREAM, queues prefix
-- KEYS accounts prefix, ages prefix
-- ARGV worker    name          id
-- ARGV max_tries 1..1_000_000
-- ARGV limit     1..200        largest number of groups
-- replies OK revoked left
-- keeps I1, I2, I10 (no process waits for a dead worker), I13 (a repeated call finds nothing)

local under = {groups = groups, queues = queues, accounts = accounts, ages = ages, dead = dead, dead_letters = dead_letters,
  leases = leases, leased_by = leased_by, events = events, bell_workers = bell_workers, bell_producer = bell_producer}
-- all keys with a prefix are read first: a wrong type stops the script before it writes
local found = {}
for _, held in ipairs(held_groups(leased_by .. worker)) do
  if #found < limit then found[#found + 1] = found_group(under, worker, held[1], held[2]) end
end
local waiting, died = take_back(under, found, max_tries, 'worker fenced')
redis.call('ZREM', workers, worker)
redis.call('UNLINK', worker_record)
log_event(events, 'worker_fenced', 'worker', worker, 'groups', waiting + died)
return {'OK', waiting + died, held_count(leased_by .. worker)}
