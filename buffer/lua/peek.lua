#!lua flags=no-writes
-- peek: return the first groups of a pool in the order of their use, none of them too old. Takes nothing.
-- KEYS ledger HASH, pool ZSET, groups prefix
-- ARGV order     staleness|fifo  see next_in_order; staleness for a pool that has no other order
-- ARGV threshold ''|0..   stale threshold in steps; '' = nothing is too old
-- ARGV limit     1..1024  largest number of groups
-- replies OK, then "gid token chunks size crc samples version" per group
-- keeps I8 (does not rely on refresh)

local cut = '-inf'
if threshold then cut = int(next_step(ledger) - threshold) end
local reply = {'OK'}
for _, member in ipairs(next_in_order(order, pool, cut, limit)) do reply[#reply + 1] = manifest_line(groups, string.match(member, ':(.*)$')) end
return reply
