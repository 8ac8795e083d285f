#!lua flags=allow-oom
-- submit: a worker hands in what it made of a group; its bytes are already stored under its own token.
-- include: bells, byte_count, clock, events, numbers, order_index, payloads, staleness
-- KEYS[1] leases     ZSET
-- KEYS[2] holds      SET      gids that the worker holds
-- KEYS[3] groups     prefix of the group records (HASH)
-- KEYS[4] progress   HASH     of the task
-- KEYS[5] completed  ZSET     pool of the task
-- KEYS[6] aborted    ZSET     pool of the task
-- KEYS[7] filtered   STRING   bitmap
-- KEYS[8] lineages   LIST*
-- KEYS[9] garbage    SET
-- KEYS[10] bell_trainer   LIST*
-- KEYS[11] bell_producer  LIST*
-- KEYS[12] events    STREAM*
-- KEYS[13] order     ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[14] bytes     HASH
-- KEYS[15] unpinned  SET
-- KEYS[16+] payload  STRING* x0..1024  the chunks, in order; none in a cluster
-- ARGV[1] gid          gid
-- ARGV[2] token        token                       of the claim
-- ARGV[3] status       completed|aborted|filtered
-- ARGV[4] samples      1..4096                     rollouts in the group
-- ARGV[5] tokens       0..1_000_000_000_000        generated since the claim (net of a partial rollout's history)
-- ARGV[6] size         0..1_000_000_000_000        bytes of all chunks
-- ARGV[7] crc          hex                         CRC-32 of all bytes, hex
-- ARGV[8] reward_sum   number                      of all scores in a completed or filtered group
-- ARGV[9] reward_count 0..4096                     how many scores that are
-- ARGV[10] order       ''|arrival|bucket|number    place in the index: buckets take turns, a number is a score; '' = no index
-- ARGV[11] lag         ''|0..                      steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV[12] chunks      1..1024
-- ARGV[13+] what, lineage, version  oldest|last, name, 0.. x0..128  of each lineage in the group: its oldest version; of the
--                      rollouts whose last trained token it made, the least newest version. None = no token was generated
-- replies OK arrival | FENCED | MISSING size_found
-- keeps I1, I2 (an old token changes nothing), I8 (versions of dead lineages count as the fork), I11 (a result gives the try back), I12 (never refused), I13 (token), I14
local leases, holds, groups, progress, completed, aborted = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local filtered, lineages, garbage = KEYS[7], KEYS[8], KEYS[9]
local bell_trainer, bell_producer, events, order, bytes = KEYS[10], KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local gid, token, status = ARGV[1], ARGV[2], ARGV[3]
local samples, tokens, size, crc, reward_sum, reward_count = ARGV[4], ARGV[5], num(ARGV[6]), ARGV[7], ARGV[8], ARGV[9]
local place, lag, chunks, unpinned = ARGV[10], ARGV[11], ARGV[12], KEYS[15]

local record = groups .. gid
local held = redis.call('HMGET', record, 'payload', 'chunks', 'stage', 'token', 'draw', 'tries', 'aborts', 'tokens',
  'arrival', 'size', 'prompt')
local payload, stage = held[1], held[3]
if payload == token then return {'OK', held[9]} end
if not stage then
  local draw = tonumber(string.match(gid, '%-(%d+)$'))
  if status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then return {'OK', '0'} end
  return {'FENCED'}
end
if held[4] ~= token or stage ~= 'running' then return {'FENCED'} end
local found = seen_bytes(KEYS, 16, 0, num(chunks), size)
if found ~= size then return {'MISSING', int(found)} end

local version, lineage, score, fields = age_of(lineages, ARGV, 13, lag)
redis.call('ZREM', leases, gid)
redis.call('SREM', holds, gid)
-- all counters in two calls: what they cost is the call, not the number
local counts = redis.call('HMGET', progress, 'running', 'produced_samples', 'produced_tokens', 'raw_rewards_sum',
  'raw_rewards_count', 'arrivals', 'failures_in_row')
local arrival = string.format('%010d', num(counts[6]) + 1)
redis.call('HSET', progress, 'running', int(num(counts[1]) - 1), 'produced_samples', int(num(counts[2]) + num(samples)),
  'produced_tokens', int(num(counts[3]) + num(tokens)),
  'raw_rewards_sum', string.format('%.17g', num(counts[4]) + num(reward_sum)),
  'raw_rewards_count', int(num(counts[5]) + num(reward_count)), 'arrivals', int(num(counts[6]) + 1))
if status == 'completed' and num(counts[7]) > 0 then redis.call('HSET', progress, 'failures_in_row', 0) end
if payload ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[2]) end
local went = payload ~= 'init' and num(held[10]) or 0

if status == 'filtered' then
  redis.call('SADD', garbage, gid .. ' init 1', gid .. ' ' .. token .. ' ' .. chunks)
  redis.call('SETBIT', filtered, held[5], 1)
  redis.call('HINCRBY', progress, 'filtered', 1)
  redis.call('HINCRBY', progress, 'failures_in_row', 1)
  count_bytes(bytes, 0, went + num(held[11]))
  redis.call('UNLINK', record)
else
  pin(KEYS, 16, unpinned, gid .. ' ' .. token .. ' ' .. chunks)
  count_bytes(bytes, size, went)
  -- what only a running group needs would put the record into a larger size class
  redis.call('HDEL', record, 'token', 'lane', 'entry', 'claimed_ms')
  -- I11: only failures and lost leases use up a try
  local aborts = num(held[7]) + (status == 'aborted' and 1 or 0)
  redis.call('HSET', record, 'stage', 'pool', 'status', status, 'payload', token, 'chunks', chunks,
    'size', int(size), 'crc', crc, 'version', version, 'lineage', lineage, 'samples', samples,
    'arrival', arrival, 'reward', reward_sum, 'submitted_ms', int(now_ms()),
    'tokens', int(num(held[8]) + num(tokens)), 'tries', int(num(held[6]) - 1), 'aborts', int(aborts))
  if fields then redis.call('HSET', record, unpack(fields)) end
  redis.call('ZADD', status == 'completed' and completed or aborted, score, arrival .. ':' .. gid)
  if status == 'completed' then put_in_order(order, progress, place, arrival, gid) end
end
ring(status == 'completed' and bell_trainer or bell_producer, 1)
log_event(events, status, 'gid', gid, 'version', version, 'tokens', tokens)
return {'OK', arrival}
