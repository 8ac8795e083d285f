#!lua flags=allow-oom
-- submit: accept the result of a group from its worker; its bytes are already stored under the worker's token.
-- A completed group with teachers waits for the first of them, then for the next, before it is in the pool. A teacher adds
-- columns: all counts are those of the worker that sampled the group.
-- include: ages, byte_count, clock, earlier_counts, events, leased, lanes, numbers, order_index, payloads, staleness, task_failures, waiting, wake_ups
-- KEYS leases        ZSET
-- KEYS leased        HASH     what the worker holds
-- KEYS groups        prefix   of the group records (HASH)
-- KEYS progress      HASH*    of the task
-- KEYS completed     ZSET*    pool of the task
-- KEYS aborted       ZSET*    pool of the task
-- KEYS filtered      STRING*  bitmap
-- KEYS lineages      LIST*
-- KEYS garbage       SET*
-- KEYS bell_trainer  LIST*
-- KEYS bell_producer LIST*
-- KEYS bell_teachers LIST*
-- KEYS queues        prefix   of the queues (STREAM)
-- KEYS events        STREAM*
-- KEYS order_index   ZSET*    of the completed groups of the task, if the policy needs one
-- KEYS bytes         HASH
-- KEYS unpinned      SET*
-- KEYS age_index     ZSET*    groups of the task that wait or run, by their oldest version
-- KEYS payloads  STRING* x0..1024  the chunks, in order; none in a cluster
-- ARGV gid          gid
-- ARGV token        token                       of the claim
-- ARGV status       completed|aborted|filtered
-- ARGV samples      1..4096                     rollouts in the group
-- ARGV tokens       0..1_000_000_000_000        generated since the claim (net of a partial rollout's history)
-- ARGV length       0..1_000_000_000_000        tokens in all responses
-- ARGV size         0..1_000_000_000_000        bytes of all chunks
-- ARGV crc          hex                         CRC-32 of all bytes, hex
-- ARGV reward_sum   number                      of all scores in a completed or filtered group
-- ARGV reward_count 0..4096                     number of these scores
-- ARGV unparsed     ''|0..4096                  of these rollouts, those without an answer that a judge could read
-- ARGV truncated    ''|0..4096                  of these rollouts, those that ended at their token limit
-- ARGV order        ''|arrival|bucket|number    position in the index: buckets take turns, a number is a score; '' = no index
-- ARGV token_lead   ''|0..                      steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV task         name
-- ARGV ms           0..                         time from the group's claims to its result, without that in between
-- ARGV patience     ''|1..                      filtered groups of the task in a row after which it is stopped; '' = no limit
-- ARGV chunks       1..1024
-- ARGV teachers     ''|names                    that a completed group passes, in order; a teacher leaves them out
-- ARGV sampled      ''|hex                      CRC-32 of all columns but those of teachers; '' = it passes no teacher
-- ARGV what, lineage, version  oldest|last|newest, name, 0.. x0..128  of each lineage in the group: its oldest version; of
--                      the rollouts whose last trained token it made, the least newest version; if rollouts differ in
--                      age, of those whose oldest token it made, the newest version. none = no token was generated
-- replies OK arrival | FENCED | CHANGED (a teacher changed another column) | MISSING size_found
-- keeps I1, I2 (an old token changes nothing), I8 (versions of dead lineages count as the fork), I11 (a result gives the try back), I12 (never refused), I13 (token), I14

local record = groups .. gid
local held = redis.call('HMGET', record, 'payload', 'chunks', 'stage', 'token', 'draw', 'tries', 'aborts',
  'arrival', 'size', 'prompt', 'owner', 'continued', 'lane', 'teachers', 'sampled', 'sampler', 'replaced')
local payload, stage, teacher = held[1], held[3], teacher_of(held[13])
if payload == token or held[17] == token then return {'OK', held[8]} end
if not stage then
  local draw = tonumber(string.match(gid, '%-(%d+)$'))
  if status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then return {'OK', '0'} end
  return {'FENCED'}
end
if held[4] ~= token or stage ~= 'running' then return {'FENCED'} end
if teacher and held[15] ~= sampled then return {'CHANGED'} end
local found = seen_bytes(payloads, 0, chunks, size)
if found ~= size then return {'MISSING', int(found)} end
local lane, later
if status == 'completed' then lane, later = string.match(teacher and held[14] or teachers, '^([^,]+),?(.*)$') end
lane = lane and 'teach.' .. lane
local jobs = queues .. task .. ':' .. (lane or '')

local version, lineage, score, fields = age_of(lineages, each_unit, token_lead)
local counts = redis.call('HMGET', progress, 'running', 'produced_samples', 'produced_tokens', 'raw_rewards_sum',
  'raw_rewards_count', 'arrivals', 'failures_in_row', 'filtered_in_row', 'produced_groups', 'produced_ms',
  'unparsed', 'truncated')
-- an audit does not blame the worker that completed a group for tokens of others
local is_own = payload == 'init' or ((teacher or has_turns_of(token, payload)) and not held[12])
if not is_own then fields[#fields + 1], fields[#fields + 2] = 'continued', 1 end
local pool = status == 'completed' and completed or aborted
-- only what this status writes: a wrong type stops the script before it writes
redis.call('ZCARD', pool)
if lane then redis.call('XLEN', jobs) end
if order ~= '' then redis.call('ZCARD', order_index) end
if #payloads == 0 then redis.call('SCARD', unpinned) end
if status == 'filtered' then redis.call('STRLEN', filtered) end
if status == 'filtered' or payload ~= 'init' then redis.call('SCARD', garbage) end

redis.call('ZREM', age_index, gid)
let_go(leases, leased, held[11], gid, token)
-- all counters in one call: the cost is that of the call, not of the number of fields
local arrival, changed = held[8], {'running', int(num(counts[1]) - 1)}
local function change(field, value) changed[#changed + 1], changed[#changed + 2] = field, value end
if not teacher then
  arrival = string.format('%010d', num(counts[6]) + 1)
  change('produced_samples', int(num(counts[2]) + samples))
  change('produced_tokens', int(num(counts[3]) + tokens))
  change('raw_rewards_sum', string.format('%.17g', num(counts[4]) + num(reward_sum)))
  change('raw_rewards_count', int(num(counts[5]) + reward_count))
  change('arrivals', int(num(counts[6]) + 1))
  if status == 'completed' and num(counts[8]) > 0 then change('filtered_in_row', 0) end
end
if status ~= 'aborted' and not teacher then
  change('produced_groups', int(num(counts[9]) + 1))
  change('produced_ms', int(num(counts[10]) + ms))
  if (unparsed or 0) > 0 then change('unparsed', int(num(counts[11]) + unparsed)) end
  if (truncated or 0) > 0 then change('truncated', int(num(counts[12]) + truncated)) end
end
-- a filtered group was generated and judged: its task works; one that goes to a teacher may still fail there
if status ~= 'aborted' and not lane and num(counts[7]) > 0 then change('failures_in_row', 0) end
redis.call('HSET', progress, unpack(changed))
if payload ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[2]) end
local went = payload ~= 'init' and num(held[9]) or 0

if status == 'filtered' then
  redis.call('SADD', garbage, gid .. ' init 1', gid .. ' ' .. token .. ' ' .. chunks)
  redis.call('SETBIT', filtered, held[5], 1)
  redis.call('HINCRBY', progress, 'filtered', 1)
  local in_row = redis.call('HINCRBY', progress, 'filtered_in_row', 1)
  if patience and in_row >= patience and redis.call('HEXISTS', progress, 'stopped') == 0 then
    stop_task(progress, task, in_row .. ' groups in a row were filtered', bell_trainer, events)
  end
  count_bytes(bytes, 0, went + num(held[10]))
  redis.call('UNLINK', record)
else
  pin(payloads, 0, unpinned, gid .. ' ' .. token .. ' ' .. chunks)
  count_bytes(bytes, size, went)
  -- fields that only a running group needs would move the record into a larger size class
  redis.call('HDEL', record, 'token', 'lane', 'entry', 'claimed_ms', 'newest', 'cut', 'continued', 'teachers', 'sampled', 'sampler')
  -- I11: only failures and lost leases use up a try
  local aborts = num(held[7]) + (status == 'aborted' and 1 or 0)
  local sampler = teacher and held[16] or held[11] or ''
  if teacher then fields = {'owner', sampler, 'replaced', payload, unpack(fields)} end
  redis.call('HSET', record, 'stage', 'pool', 'status', status, 'payload', token, 'chunks', chunks,
    'size', int(size), 'crc', crc, 'version', version, 'lineage', lineage, 'samples', samples,
    'arrival', arrival, 'reward', reward_sum, 'submitted_ms', int(now_ms()),
    'tokens', int(length), 'tries', int(num(held[6]) - 1), 'aborts', int(aborts), unpack(fields))
  if lane then
    to_waiting(jobs, record, gid, lane, token, progress)
    redis.call('HSET', record, 'teachers', later, 'sampled', sampled, 'sampler', sampler)
    keep_age(age_index, gid, token, version)
  else
    redis.call('ZADD', pool, score, arrival .. ':' .. gid)
    if status == 'completed' then put_in_order(order_index, progress, order, arrival, gid) end
  end
end
if status ~= 'aborted' and not teacher then keep_counts(progress, num(counts[9]) + 1) end
wake(lane and bell_teachers or status == 'completed' and bell_trainer or bell_producer, 1)
log_event(events, teacher and 'taught' or status, 'gid', gid, 'worker', held[11], 'version', version, 'tokens', int(tokens))
return {'OK', arrival}
