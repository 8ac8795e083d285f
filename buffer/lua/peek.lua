#!lua flags=no-writes
-- peek: return the first groups of a pool in the order of their use, none of them too old. Takes nothing.
-- include: manifests, next_in_order, numbers, steps
-- KEYS ledger      HASH
-- KEYS pool        ZSET
-- KEYS order_index ZSET  of the completed groups of the task, if the policy needs one
-- KEYS progress    HASH  of the task
-- KEYS groups      prefix  of the group records (HASH)
-- ARGV policy    policy   order policy of the run; staleness for a pool that has no other order
-- ARGV threshold ''|0..   stale threshold in steps; '' = nothing is too old
-- ARGV limit     1..1024  largest number of groups
-- replies OK, then "gid token chunks size crc samples version" per group
--       | BLOCKED | UNORDERED (see buffer/groups/pools.py)
-- keeps I8 (does not rely on refresh)

local cut = '-inf'
if threshold then cut = int(next_step(ledger) - threshold) end
local members, problem = next_in_order(policy, pool, order_index, progress, cut, limit, true)
if problem == 'blocked' then return {'BLOCKED'} end
if problem == 'unordered' then return {'UNORDERED'} end
local reply = {'OK'}
for _, member in ipairs(members) do reply[#reply + 1] = manifest_line(groups, string.match(member, ':(.*)$')) end
return reply
