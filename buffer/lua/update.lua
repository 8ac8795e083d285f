#!lua
-- update: replace the bytes of a group in a pool with others, stored under a token of their own, and update its record.
-- It keeps its arrival.
-- KEYS record HASH, completed ZSET, aborted ZSET, expired ZSET, ends prefix
-- KEYS lineages LIST, garbage SET, bell_trainer LIST, events STREAM, bytes HASH
-- KEYS payloads  STRING* x1..1024  the chunks, in order
-- ARGV gid      gid
-- ARGV replaces token                     of the bytes that the caller has read
-- ARGV token    token                     of the new bytes
-- ARGV status   completed|aborted
-- ARGV samples  1..4096                   rollouts in the group
-- ARGV tokens   0..1_000_000_000_000      in all responses
-- ARGV size     0..1_000_000_000_000      bytes of all chunks
-- ARGV crc      hex                       CRC-32 of all bytes, hex
-- ARGV reward   number                    sum of all scores
-- ARGV token_lead ''|0..                    steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV chunks   1..1024
-- ARGV made_by  ''|ages                  as in submit; '' = no limit of age
-- replies OK | CHANGED token | NOT_POOLED stage | ENDED stage | UNKNOWN | MISSING size_found
-- keeps I1, I2 (compare-and-set), I8, I12 (counts bytes), I13 (token), I14

local held = fields_of(record, 'stage', 'status', 'payload', 'chunks', 'arrival', 'size')
if not held.stage then
  return answer_without_record(ends, gid)
end
if held.payload == token then return {'OK'} end
if held.stage ~= 'pool' then return {'NOT_POOLED', held.stage} end
if held.payload ~= replaces then return {'CHANGED', held.payload} end
local found = seen_bytes(payloads, 0, chunks)
if found ~= size then return {'MISSING', int(found)} end

local version, lineage, score, fields = age_of(lineages, made_by, token_lead)
pin(payloads, 0, chunks)
-- the bytes of an expired group are those of its prompt, which is kept
count_bytes(bytes, size, free_payload(garbage, gid, held))
redis.call('HSET', record, 'status', status, 'payload', token, 'chunks', chunks, 'size', int(size), 'crc', crc,
  'version', version, 'lineage', lineage, 'samples', samples, 'tokens', int(tokens), 'reward', reward)
redis.call('HDEL', record, 'newest', 'cut')
if #fields > 0 then redis.call('HSET', record, unpack(fields)) end

local pools, member = {completed = completed, aborted = aborted, expired = expired}, held.arrival .. ':' .. gid
if held.status ~= status then redis.call('ZREM', pools[held.status], member) end
redis.call('ZADD', pools[status], score, member)
if status == 'completed' then wake(bell_trainer, 1) end
log_event(events, 'updated', 'gid', gid, 'status', status, 'version', version)
return {'OK'}
