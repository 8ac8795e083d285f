#!lua flags=allow-oom
-- submit: a worker hands in what it made of a group; its bytes are already stored under its own token.
-- KEYS[1] leases     ZSET
-- KEYS[2] holds      SET      gids that the worker holds
-- KEYS[3] groups     prefix of the group records (HASH)
-- KEYS[4] progress   HASH     of the task
-- KEYS[5] completed  ZSET     pool of the task
-- KEYS[6] aborted    ZSET     pool of the task
-- KEYS[7] filtered   STRING   bitmap
-- KEYS[8] lineages   LIST
-- KEYS[9] garbage    SET
-- KEYS[10] bell_trainer   LIST
-- KEYS[11] bell_producer  LIST
-- KEYS[12] events    STREAM
-- KEYS[13] order     ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[14+] payload  STRING   the chunks, in order
-- ARGV[1] gid
-- ARGV[2] token      of the claim
-- ARGV[3] status     completed | aborted | filtered
-- ARGV[4] samples    rollouts in the group
-- ARGV[5] tokens     generated since the claim (net of a partial rollout's history)
-- ARGV[6] size       bytes of all chunks
-- ARGV[7] crc        CRC-32 of all bytes, hex
-- ARGV[8] reward_sum    of all scores in a completed or filtered group
-- ARGV[9] reward_count  how many scores that are
-- ARGV[10] order     place in the index: arrival | bucket:<n> (buckets take turns) | a score; '' = no index
-- ARGV[11+] lineage, version  pairs: the oldest policy version of each lineage in the group; none = no token was generated
-- replies OK arrival | FENCED | MISSING size_found
-- keeps I1, I2 (an old token changes nothing), I8 (versions of dead lineages count as the fork), I11 (a result gives the try back), I13 (token), I14
local leases, holds, groups, progress, completed, aborted = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local filtered, lineages, garbage = KEYS[7], KEYS[8], KEYS[9]
local bell_trainer, bell_producer, events, order = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local gid, token, status = ARGV[1], ARGV[2], ARGV[3]
local samples, tokens, size, crc, reward_sum, reward_count = ARGV[4], ARGV[5], num(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
local place, chunks = ARGV[10], #KEYS - 13

local record = groups .. gid
local held = redis.call('HMGET', record, 'token', 'stage', 'payload', 'arrival', 'chunks', 'draw')
if held[3] == token then return {'OK', held[4]} end
if not held[1] then
  local draw = tonumber(string.match(gid, '%-(%d+)$'))
  if status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then return {'OK', '0'} end
  return {'FENCED'}
end
if held[1] ~= token or held[2] ~= 'running' then return {'FENCED'} end
local found = 0
for i = 14, #KEYS do found = found + redis.call('STRLEN', KEYS[i]) end
if found ~= size then return {'MISSING', int(found)} end

local version, lineage = '', ''
for i = 11, #ARGV - 1, 2 do
  local living = living_version(lineages, ARGV[i], ARGV[i + 1])
  if version == '' or tonumber(living) < tonumber(version) then version, lineage = living, ARGV[i] end
end

redis.call('ZREM', leases, gid)
redis.call('SREM', holds, gid)
redis.call('HINCRBY', progress, 'running', -1)
redis.call('HINCRBY', progress, 'produced_samples', samples)
redis.call('HINCRBY', progress, 'produced_tokens', tokens)
redis.call('HINCRBYFLOAT', progress, 'raw_rewards_sum', reward_sum)
redis.call('HINCRBY', progress, 'raw_rewards_count', reward_count)
if held[3] ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. held[3] .. ' ' .. held[5]) end
local arrival = string.format('%010d', redis.call('HINCRBY', progress, 'arrivals', 1))

if status == 'filtered' then
  redis.call('SADD', garbage, gid .. ' init 1', gid .. ' ' .. token .. ' ' .. chunks)
  redis.call('SETBIT', filtered, held[6], 1)
  redis.call('HINCRBY', progress, 'filtered', 1)
  redis.call('UNLINK', record)
else
  for i = 14, #KEYS do redis.call('PERSIST', KEYS[i]) end
  redis.call('HSET', record, 'stage', 'pool', 'status', status, 'payload', token, 'chunks', chunks,
    'size', int(size), 'crc', crc, 'version', version, 'lineage', lineage, 'samples', samples,
    'arrival', arrival, 'reward', reward_sum, 'submitted_ms', int(now_ms()))
  redis.call('HINCRBY', record, 'tokens', tokens)
  local score = version == '' and '+inf' or version
  redis.call('ZADD', status == 'completed' and completed or aborted, score, arrival .. ':' .. gid)
  if status == 'completed' then put_in_order(order, progress, place, arrival, gid) end
  -- I11: only failures and lost leases use up a try
  redis.call('HINCRBY', record, 'tries', -1)
  if status == 'aborted' then redis.call('HINCRBY', record, 'aborts', 1) end
end
ring(status == 'completed' and bell_trainer or bell_producer, 1)
log_event(events, status, 'gid', gid, 'version', version, 'tokens', tokens)
return {'OK', arrival}
