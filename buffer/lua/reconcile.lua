#!lua flags=allow-oom
-- reconcile: agree with a worker on what it holds, after a heartbeat found that the two differ; and renew its lease.
-- What the worker does not name, it does not know: it restarted, or the reply to a claim was lost. That is taken back,
-- but not before a claim under way must have arrived.
-- KEYS clock HASH*, leases ZSET, groups prefix, leased_by prefix, worker_record HASH*, dead ZSET
-- KEYS dead_letters prefix, bell_workers LIST, bell_producer LIST, events STREAM, queues prefix
-- KEYS accounts prefix, ages prefix
-- ARGV worker    name           id
-- ARGV nonce     token          of its registration
-- ARGV lease_ms  1..86_400_000
-- ARGV max_tries 1..1_000_000
-- ARGV limit     1..200         largest number of groups to take back
-- ARGV gid, token  bytes..75, bytes..64 x0..4096  of each group that the worker holds
-- replies OK, then the number of each group that it no longer holds | UNKNOWN (register again) | REPLACED (by another
--       process with this id)
-- keeps I1, I2, I11 (a lost lease uses up a try unless its group has grown), I13 (a repeated call finds nothing)

local known = redis.call('HGET', worker_record, 'nonce')
if not known then return {'UNKNOWN'} end
if known ~= nonce then return {'REPLACED'} end

local reply, now, leased = {'OK'}, now_ms(), leased_by .. worker
local under = {groups = groups, queues = queues, accounts = accounts, ages = ages, dead = dead, dead_letters = dead_letters,
  leases = leases, leased_by = leased_by, events = events, bell_workers = bell_workers, bell_producer = bell_producer}
local known_groups, held, digest, found = {}, {}, 0, {}
for _, gid, token in each_unit do known_groups[gid .. ' ' .. token] = true end
for _, one in ipairs(held_groups(leased)) do
  local gid, token = one[1], one[2]
  held[gid .. ' ' .. token] = true
  digest = digest + mark_of(gid, token)
  if not known_groups[gid .. ' ' .. token] and #found < limit then
    local unknown = found_group(under, worker, gid, token)
    -- a claim that lies ahead was made before the clock was set back
    if math.abs(now - unknown.claimed_ms) > lease_ms then found[#found + 1] = unknown end
  end
end
for n, gid, token in each_unit do
  if not held[gid .. ' ' .. token] then reply[#reply + 1] = n end
end

-- after an outage, claims may have been under way for as long as it took
if now < tick(clock, now, lease_ms) then found = {} end
if digest > 0 then
  redis.call('HSET', leased, 'digest', int(digest))
  redis.call('ZADD', leases, int(now + lease_ms), worker)
else
  redis.call('UNLINK', leased)
  redis.call('ZREM', leases, worker)
end
take_back(under, found, max_tries, 'its worker does not know it')
return reply
