#!lua
-- keep_turns: add turns of a running group's agents to its payload; their bytes are stored already, as its next chunks.
-- The first call of a claim replaces the payload by one of its own, which begins with the group as it was claimed.
-- The worker answers an agent after this call. If it dies before, nobody has seen the turn; if it dies later, the next
-- claim reads the turns, and this one used up no try (`take_back`). Submit, requeue, expiry and drop free them
-- as they free every payload that they replace or end.
-- KEYS record HASH, garbage SET, bytes HASH, age_index ZSET*, lineages LIST*, worker_tokens_of prefix, progress HASH
-- KEYS payloads  STRING* x0..1024  the new chunks, in order
-- ARGV gid       gid
-- ARGV token     token                 of the claim
-- ARGV name      1..1_000_000          number of the payload in this claim: its token is that of the claim with -turns<name>
-- ARGV replaces  token                 of the payload that the caller knows
-- ARGV before    0..1024               its chunks before this call; 0 = it begins
-- ARGV chunks    1..1024               the same with the new ones
-- ARGV added     0..1_000_000_000_000  bytes of the new chunks
-- ARGV size      0..1_000_000_000_000  bytes of all its chunks
-- ARGV crc       hex                   CRC-32 of all its bytes
-- ARGV length    0..1_000_000_000_000  tokens in all responses
-- ARGV task      name
-- ARGV sampled   0..1_000_000_000_000  tokens that were sampled in the turns of this claim
-- ARGV made_by   ''|ages                with the oldest version of each lineage in the group, as in submit
-- replies OK | FENCED | BEHIND payload (the server lost chunks, or has another payload: write all turns under another name)
--       | MISSING size_found
-- keeps I1 (nothing moves), I2 (an old token changes nothing), I8, I11 (`best`: tokens at a claim before), I12 (counts bytes), I13 (token, name, chunks), I14

local held = fields_of(record, 'stage', 'token', 'payload', 'chunks', 'size', 'tokens', 'best',
  'owner', 'made', 'counted')
local payload, known, turns = held.payload, num(held.chunks), token .. '-turns' .. int(name)
if held.stage ~= 'running' or held.token ~= token then return {'FENCED'} end
if payload == turns and known >= chunks then return {'OK'} end
if payload ~= replaces or (before > 0 and known ~= before) then return {'BEHIND', payload} end
local found = seen_bytes(payloads, 0, chunks - before)
if found ~= added then return {'MISSING', int(found)} end

local version, lineage = age_of(lineages, made_by)
redis.call('ZCARD', age_index)
redis.call('HLEN', worker_tokens_of .. held.owner)
local new = math.max(0, sampled - (has_turns_of(token, payload) and num(held.counted) or 0))
pin(payloads, 0, chunks - before)
count_bytes(bytes, added, before == 0 and free_payload(garbage, gid, held) or 0)
redis.call('HDEL', record, 'newest', 'cut', 'last', 'last_lineage')
if not has_turns_of(token, payload) then
  redis.call('HSET', record, 'best', payload == 'init' and 0 or int(math.max(num(held.tokens), num(held.best))))
end
redis.call('HSET', record, 'payload', turns, 'chunks', chunks, 'size', int(size), 'crc', crc, 'tokens', int(length),
  'version', version, 'lineage', lineage, 'made', int(num(held.made) + new), 'counted', int(sampled))
hear(worker_tokens_of .. held.owner, progress, task, nil, 0, new)
if version ~= '' then redis.call('ZADD', age_index, 'LT', version, gid) end
return {'OK'}
