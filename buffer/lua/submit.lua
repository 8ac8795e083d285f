#!lua flags=allow-oom
-- submit: accept results of a worker for groups of one task; their bytes are already stored under the worker's tokens.
-- Each is judged by itself, as if it had come alone: all are judged before anything is written.
-- KEYS leases ZSET, leased HASH*, groups prefix, progress HASH*, completed ZSET*, aborted ZSET*
-- KEYS filtered STRING*, lineages LIST*, garbage SET*, bell_trainer LIST*, bell_producer LIST*
-- KEYS events STREAM*, bytes HASH, age_index ZSET*
-- KEYS payloads  STRING* x1..4096  the chunks of all groups, in order
-- ARGV task         name
-- ARGV patience     ''|1..                      filtered groups of the task in a row after which it is stopped; '' = no limit
-- ARGV token_lead   ''|0..                      steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV gid          gid                         x1..64
-- ARGV token        token                       x1..64  of the claim
-- ARGV status       completed|aborted|filtered  x1..64
-- ARGV samples      1..4096                     x1..64  rollouts in the group
-- ARGV tokens       0..1_000_000_000_000        x1..64  generated since the claim (net of a partial rollout's history)
-- ARGV length       0..1_000_000_000_000        x1..64  tokens in all responses
-- ARGV size         0..1_000_000_000_000        x1..64  bytes of all chunks
-- ARGV crc          hex                         x1..64  CRC-32 of all bytes, hex
-- ARGV reward_sum   number                      x1..64  of all scores in a completed or filtered group
-- ARGV reward_count 0..4096                     x1..64  number of these scores
-- ARGV unparsed     ''|0..4096                  x1..64  of these rollouts, those without an answer that a judge could read
-- ARGV truncated    ''|0..4096                  x1..64  of these rollouts, those that ended at their token limit
-- ARGV ms           0..                         x1..64  time from the group's claims to its result, without that in between
-- ARGV chunks       1..1024                     x1..64  of KEYS
-- ARGV made_by      ''|ages                     x1..64  "oldest LINEAGE VERSION,..." of each lineage in the group: its oldest
--                      version; `last`: of the rollouts whose last trained token it made, the least newest version; `newest`, if
--                      rollouts differ in age: of those whose oldest token it made, the newest version. '' = there are no tokens
-- replies OK arrival | FENCED '' | MISSING size_found
--       of each, one behind the other
-- keeps I1, I2 (an old token changes nothing), I8 (versions of dead lineages count as the fork), I11 (a result gives the try back, one with new tokens all tries), I12 (never refused), I13 (token), I14

local is_read, before = {}, 0
-- of a key that will be written: a wrong type stops the script before it writes
local function read(command, key)
  if not is_read[key] then redis.call(command, key) end
  is_read[key] = true
end

-- Return the reply to a result, and if it is accepted, what the record of its group says.
local function judge(one)
  local gid, token, status, record = one.gid, one.token, one.status, groups .. one.gid
  local payload, stage, holder, owner, tries, arrival =
    unpack(redis.call('HMGET', record, 'payload', 'stage', 'token', 'owner', 'tries', 'arrival'))
  local first, old = before, {}
  before = before + one.chunks
  if payload == token then return {'OK', arrival} end
  local draw = tonumber(string.match(gid, '%-(%d+)$'))
  if not payload and status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then return {'OK', '0'} end
  if holder ~= token or stage ~= 'running' then return {'FENCED', ''} end
  local found = seen_bytes(payloads, first, one.chunks)
  if found ~= one.size then return {'MISSING', int(found)} end

  if payload ~= 'init' or status == 'filtered' then old = redis.call('HMGET', record, 'chunks', 'size', 'prompt') end
  local pool = status == 'completed' and completed or aborted
  local version, lineage, score, fields = age_of(lineages, one.made_by, token_lead)
  read('ZCARD', pool)
  if status == 'filtered' then read('STRLEN', filtered) end
  if status == 'filtered' or payload ~= 'init' then read('SCARD', garbage) end
  return {'OK', arrival}, {one = one, record = record, payload = payload, owner = owner, tries = tries,
    had_arrival = arrival, first = first, draw = draw, chunks = old[1], prompt = num(old[3]),
    size = payload ~= 'init' and num(old[2]) or 0, pool = pool, version = version, lineage = lineage, score = score,
    fields = fields}
end

local accepted, replies, gids, tokens, known, twins = {}, {}, {}, {}, {}, {}
for n, one in ipairs(units) do
  local reply, was = judge(one)
  replies[2 * n - 1], replies[2 * n] = reply[1], reply[2] or ''
  if was and known[one.gid] then
    twins[2 * n] = known[one.gid]  -- given twice in this call, which is as good as repeated
  elseif was then
    known[one.gid], accepted[#accepted + 1], twins[2 * n] = was, was, was
    gids[#accepted], tokens[#accepted] = one.gid, one.token
  end
end
if before ~= #payloads then return refuse('chunks', #payloads .. ' in all', before) end
if #accepted == 0 then return replies end
local counts = redis.call('HMGET', progress, 'running', 'arrivals', 'produced_samples', 'produced_tokens', 'raw_rewards_sum',
  'raw_rewards_count', 'produced_groups', 'produced_ms', 'failures_in_row', 'filtered_in_row')

redis.call('ZREM', age_index, unpack(gids))
let_go(leases, leased, accepted[1].owner, gids, tokens)
local arrivals, samples, generated, rewards, scores, produced, ms = num(counts[2]), 0, 0, 0, 0, 0, 0
local in_row, stopped_at, is_working, unparsed, truncated, ended = num(counts[10]), nil, false, 0, 0, 0
local now, unneeded, came, went, members = int(now_ms()), {}, 0, 0, {[completed] = {}, [aborted] = {}}
for n, was in ipairs(accepted) do
  local one, record = was.one, was.record
  local status, bytes_of = one.status, gids[n] .. ' ' .. tokens[n] .. ' ' .. one.chunks
  arrivals, samples, generated = arrivals + 1, samples + one.samples, generated + one.tokens
  rewards, scores = rewards + one.reward_sum, scores + one.reward_count
  was.arrival = string.format('%010d', arrivals)
  if status == 'completed' then in_row = 0 end
  if status ~= 'aborted' then
    -- a filtered group, too, was generated and judged: its task works
    produced, ms, is_working = produced + 1, ms + one.ms, true
    unparsed, truncated = unparsed + (one.unparsed or 0), truncated + (one.truncated or 0)
  end
  if was.payload ~= 'init' then unneeded[#unneeded + 1] = gids[n] .. ' ' .. was.payload .. ' ' .. was.chunks end
  went = went + was.size

  if status == 'filtered' then
    unneeded[#unneeded + 1], unneeded[#unneeded + 2] = gids[n] .. ' init 1', bytes_of
    redis.call('SETBIT', filtered, was.draw, 1)
    redis.call('UNLINK', record)
    went, ended, in_row = went + was.prompt, ended + 1, in_row + 1
    if patience and in_row >= patience then stopped_at = stopped_at or in_row end
  else
    pin(payloads, was.first, one.chunks)
    came = came + one.size
    -- fields that only a running group needs would move the record into a larger size class
    redis.call('HDEL', record, 'token', 'lane', 'entry', 'claimed_ms')
    if was.payload ~= 'init' or was.had_arrival then redis.call('HDEL', record, 'newest', 'cut', 'best') end
    -- I11: only failures and lost leases use up a try; tries without progress are counted anew once there is some
    redis.call('HSET', record, 'stage', 'pool', 'status', status, 'payload', tokens[n], 'chunks', one.chunks,
      'size', int(one.size), 'crc', one.crc, 'version', was.version, 'lineage', was.lineage, 'samples', one.samples,
      'arrival', was.arrival, 'reward', one.reward_sum, 'submitted_ms', now,
      'tokens', int(one.length), 'tries', one.tokens > 0 and 0 or int(num(was.tries) - 1), unpack(was.fields))
    if status == 'aborted' then redis.call('HINCRBY', record, 'aborts', 1) end
    local scored = members[was.pool]
    scored[#scored + 1], scored[#scored + 2] = was.score, was.arrival .. ':' .. gids[n]
  end
end
for pool, scored in pairs(members) do
  if #scored > 0 then redis.call('ZADD', pool, unpack(scored)) end
end
if #unneeded > 0 then redis.call('SADD', garbage, unpack(unneeded)) end
count_bytes(bytes, came, went)

-- the counters in one call: the cost is that of the call, not of the number of fields
redis.call('HSET', progress, 'running', int(num(counts[1]) - #accepted), 'arrivals', int(arrivals),
  'produced_samples', int(num(counts[3]) + samples), 'produced_tokens', int(num(counts[4]) + generated),
  'raw_rewards_sum', string.format('%.17g', num(counts[5]) + rewards), 'raw_rewards_count', int(num(counts[6]) + scores),
  'produced_groups', int(num(counts[7]) + produced), 'produced_ms', int(num(counts[8]) + ms),
  'failures_in_row', is_working and 0 or num(counts[9]), 'filtered_in_row', in_row)
if unparsed > 0 then redis.call('HINCRBY', progress, 'unparsed', unparsed) end
if truncated > 0 then redis.call('HINCRBY', progress, 'truncated', truncated) end
if ended > 0 then redis.call('HINCRBY', progress, 'filtered', ended) end
keep_counts(progress, num(counts[7]), num(counts[7]) + produced)
if stopped_at and redis.call('HEXISTS', progress, 'stopped') == 0 then
  stop_task(progress, task, int(stopped_at) .. ' groups in a row were filtered', bell_trainer, events)
end

local wakes = {}
for _, was in ipairs(accepted) do
  local bell = was.one.status == 'completed' and bell_trainer or bell_producer
  wakes[bell] = (wakes[bell] or 0) + 1
end
for bell, times in pairs(wakes) do wake(bell, times) end
for n, was in ipairs(accepted) do
  log_event(events, was.one.status, 'gid', gids[n], 'worker', was.owner, 'version', was.version, 'tokens',
    int(was.one.tokens))
end
for place, was in pairs(twins) do replies[place] = was.arrival end
return replies
