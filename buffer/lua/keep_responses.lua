#!lua
-- keep_responses: keep the responses with which a group became a dead letter; their bytes are stored under the claim's token.
-- KEYS record HASH, garbage SET, bytes HASH
-- KEYS payloads  STRING* x1..1024  the chunks, in order
-- ARGV gid        gid
-- ARGV token      token                 of the claim that was released as failed
-- ARGV tokens     0..1_000_000_000_000  in all responses
-- ARGV size       0..1_000_000_000_000  bytes of all chunks
-- ARGV crc        hex                   CRC-32 of all bytes, hex
-- ARGV byte_limit ''|0..                payload bytes of the run above which nothing is kept; '' = no limit
-- ARGV chunks     1..1024
-- replies OK | GONE (the group is no longer dead, died in another claim, or was answered FULL) | FULL | MISSING size_found
-- keeps I1 (nothing moves), I2, I12 (counts bytes; takes no room that work needs), I13 (token), I14

local held = fields_of(record, 'stage', 'released', 'payload', 'chunks', 'size')
if held.payload == token then return {'OK'} end
if held.stage ~= 'dead' or held.released ~= token then return {'GONE'} end
if byte_limit and held_bytes(bytes) + size > byte_limit then
  -- a late copy of this call must not keep bytes that are garbage
  redis.call('HSET', record, 'released', '')
  redis.call('SADD', garbage, gid .. ' ' .. token .. ' ' .. chunks)
  return {'FULL'}
end
local found = seen_bytes(payloads, 0, chunks)
if found ~= size then return {'MISSING', int(found)} end

pin(payloads, 0, chunks)
count_bytes(bytes, size, free_payload(garbage, gid, held))
redis.call('HSET', record, 'payload', token, 'chunks', chunks, 'size', int(size), 'crc', crc, 'tokens', int(tokens))
return {'OK'}
