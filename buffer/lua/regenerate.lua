#!lua flags=allow-oom
-- regenerate: begin to clear a run that is made anew from a checkpoint. From here on it cannot be opened, and nobody holds
-- it: without `control`, no process claims, takes or enqueues. Its settings stay, where they can be read.
-- KEYS meta HASH*, control HASH*
-- ARGV nonce      token          of the run
-- ARGV schema     name           REGENERATING, until create_run has made the run again
-- ARGV take_over  0|1            1 = even if a trainer still sends heartbeats
-- ARGV timeout_ms 0..86_400_000  silence after which a trainer counts as dead
-- replies OK | EXISTS nonce (another run has this name) | HELD silent_ms
-- keeps I6 (only the run of this nonce), I7 (no process acts on what it held), I13 (a repeated call changes nothing more)

-- a key of any type may be here: this is the way back from that
local function is_hash(key) return redis.call('TYPE', key).ok == 'hash' end

local known = is_hash(meta) and redis.call('HGET', meta, 'nonce')
if known and known ~= nonce then return {'EXISTS', known} end
if is_hash(control) then
  local refused = refuse_role(control, 'trainer', '', timeout_ms, take_over)
  if refused then return refused end
end

if not is_hash(meta) then redis.call('UNLINK', meta) end
redis.call('HSET', meta, 'nonce', nonce, 'schema', schema)
redis.call('UNLINK', control)
return {'OK'}
