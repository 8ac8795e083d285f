#!lua
-- update: a group of a pool gets other bytes, stored under a token of their own, and the index what is true of them. It
-- keeps its arrival, and its turn in an order that does not depend on what is in it.
-- include: bells, byte_count, ended, events, numbers, order_index, payloads, staleness
-- KEYS[1] group      HASH     record of the group
-- KEYS[2] progress   HASH     of the task
-- KEYS[3] completed  ZSET     pool of the task
-- KEYS[4] aborted    ZSET     pool of the task
-- KEYS[5] expired    ZSET     pool of the task
-- KEYS[6] order      ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[7] archived   STRING   bitmap
-- KEYS[8] filtered   STRING   bitmap
-- KEYS[9] dropped    STRING   bitmap
-- KEYS[10] lineages  LIST
-- KEYS[11] garbage   SET
-- KEYS[12] bell      LIST     of the trainer
-- KEYS[13] events    STREAM
-- KEYS[14] bytes     HASH
-- KEYS[15] unpinned  SET
-- KEYS[16+] payload  STRING* x0..1024  the chunks, in order; none in a cluster
-- ARGV[1] gid        gid
-- ARGV[2] draw       0..69_999_999
-- ARGV[3] replaces   token                      of the bytes that the caller has seen
-- ARGV[4] token      token                      of the new bytes
-- ARGV[5] status     completed|aborted
-- ARGV[6] samples    1..4096                    rollouts in the group
-- ARGV[7] tokens     0..1_000_000_000_000       in all responses
-- ARGV[8] size       0..1_000_000_000_000       bytes of all chunks
-- ARGV[9] crc        hex                        CRC-32 of all bytes, hex
-- ARGV[10] reward    number                     sum of all scores
-- ARGV[11] order     ''|arrival|bucket|number   place in the index: buckets take turns, a number is a score; '' = no index
-- ARGV[12] lag       ''|0..                     steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV[13] chunks    1..1024
-- ARGV[14+] what, lineage, version  oldest|last, name, 0.. x0..128  as in submit; none = it never ages
-- replies OK | CHANGED token | NOT_POOLED stage | ENDED place | UNKNOWN | MISSING size_found
-- keeps I1, I2 (compare-and-set), I8, I12 (counts bytes), I13 (token), I14
local group, progress, completed, aborted, expired, order = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local archived, filtered, dropped, lineages, garbage = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local bell, events, bytes, unpinned = KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local gid, draw, replaces, token, status = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local samples, tokens, size, crc, reward, turn = ARGV[6], ARGV[7], num(ARGV[8]), ARGV[9], ARGV[10], ARGV[11]
local chunks = ARGV[13]

local held = redis.call('HMGET', group, 'stage', 'status', 'payload', 'chunks', 'arrival', 'size')
if not held[1] then
  local place = ended_place({archived = archived, filtered = filtered, dropped = dropped}, draw)
  if place then return {'ENDED', place} end
  return {'UNKNOWN'}
end
if held[3] == token then return {'OK'} end
if held[1] ~= 'pool' then return {'NOT_POOLED', held[1]} end
if held[3] ~= replaces then return {'CHANGED', held[3]} end
local found = seen_bytes(KEYS, 16, 0, num(chunks), size)
if found ~= size then return {'MISSING', int(found)} end

local version, lineage, score, fields = age_of(lineages, ARGV, 14, ARGV[12])
pin(KEYS, 16, unpinned, gid .. ' ' .. token .. ' ' .. chunks)
if replaces ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. replaces .. ' ' .. held[4]) end
-- the bytes of an expired group are those of its prompt, which stays
count_bytes(bytes, size, replaces == 'init' and 0 or num(held[6]))
redis.call('HSET', group, 'status', status, 'payload', token, 'chunks', chunks, 'size', int(size), 'crc', crc,
  'version', version, 'lineage', lineage, 'samples', samples, 'tokens', tokens, 'reward', reward)
if fields then redis.call('HSET', group, unpack(fields)) end

local pools, member = {completed = completed, aborted = aborted, expired = expired}, held[5] .. ':' .. gid
if held[2] ~= status then redis.call('ZREM', pools[held[2]], member) end
redis.call('ZADD', pools[status], score, member)
if status ~= 'completed' then
  redis.call('ZREM', order, member)
elseif tonumber(turn) or not redis.call('ZSCORE', order, member) then
  put_in_order(order, progress, turn, held[5], gid)
end
if status == 'completed' then ring(bell, 1) end
log_event(events, 'updated', 'gid', gid, 'status', status, 'version', version)
return {'OK'}
