#!lua flags=no-writes
-- peek: the first groups of a pool in the order in which they will be used, none of them too old. Nothing is taken.
-- include: manifests, numbers, ready
-- KEYS[1] ledger     HASH
-- KEYS[2] pool       ZSET
-- KEYS[3] order      ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[4] progress   HASH     of the task
-- KEYS[5] groups     prefix of the group records (HASH)
-- ARGV[1] policy     policy    order policy of the run; staleness for a pool that has no other order
-- ARGV[2] threshold  ''|0..    stale threshold in steps; '' = nothing is too old
-- ARGV[3] limit      1..1024   groups at most
-- replies OK, then "gid token chunks size crc samples version" per group
--       | BLOCKED | UNORDERED (see buffer/order_index.py)
-- keeps I8 (does not rely on refresh)
local ledger, pool, order, progress, groups = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local policy, threshold, limit = ARGV[1], ARGV[2], num(ARGV[3])
local cut = '-inf'
if threshold ~= '' then cut = int(num(redis.call('HGET', ledger, 'taken')) + 1 - tonumber(threshold)) end
local members, problem = next_ready(policy, pool, order, progress, cut, limit, true)
if problem == 'blocked' then return {'BLOCKED'} end
if problem == 'unordered' then return {'UNORDERED'} end
local reply = {'OK'}
for _, member in ipairs(members) do reply[#reply + 1] = manifest_line(groups, string.match(member, ':(.*)$')) end
return reply
