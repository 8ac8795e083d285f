#!lua flags=allow-oom
-- submit: accept results of a worker for groups of one task; their bytes are already stored under the worker's tokens.
-- Each is judged by itself, as if it had come alone: all are judged before anything is written.
-- KEYS leases ZSET, leased HASH*, groups prefix, progress HASH*, completed ZSET, aborted ZSET
-- KEYS filtered STRING, lineages LIST*, garbage SET, bell_trainer LIST*, bell_producer LIST*
-- KEYS events STREAM*, bytes HASH, age_index ZSET*, worker_tokens HASH
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
-- ARGV sampled      ''|sampled                  x1..64  made, kept and expired tokens: see shared/tokens.lua
-- ARGV aged         ''|text..4096               x1..64  "lineage:version:tokens ..." that it keeps, where single tokens expire
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

local accepted, answers, known, gids, tokens, first = {}, {}, {}, {}, {}, 0

-- Return the answer to a result, whose chunks are behind the `first` ones: a code and a fact. If it is accepted, `one` gets
-- what the record of its group says, and what else is written.
local function judge(one)
  local gid, token, status = one.gid, one.token, one.status
  one.record, one.first = groups .. gid, first
  local payload, chunks, size, stage, holder, owner, tries, arrival, prompt, made, counted = unpack(redis.call('HMGET', one.record,
    'payload', 'chunks', 'size', 'stage', 'token', 'owner', 'tries', 'arrival', 'prompt', 'made', 'counted'))
  if payload == token then return {'OK', arrival} end
  local draw = tonumber(string.match(gid, '%-(%d+)$'))
  if not payload and status == 'filtered' and redis.call('GETBIT', filtered, draw) == 1 then return {'OK', '0'} end
  if holder ~= token or stage ~= 'running' then return {'FENCED', ''} end
  local found = seen_bytes(payloads, first, one.chunks)
  if found ~= one.size then return {'MISSING', int(found)} end
  -- given twice in this call, which is as good as repeated
  if known[gid] then return known[gid] end

  one.version, one.lineage, one.score, one.fields = age_of(lineages, one.made_by, token_lead)
  one.owner, one.draw, one.prompt, one.had_arrival = owner, draw, num(prompt), arrival
  one.new, one.kept, one.old, one.total, one.closed =
    claimed_tokens(one.sampled, has_turns_of(token, payload) and counted)
  one.made = one.new + num(made)
  -- I11: only failures and lost leases use up a try; tries without progress are counted anew once there is some
  one.tries = one.tokens > 0 and 0 or int(num(tries) - 1)
  if payload ~= 'init' then one.replaced, one.went = gid .. ' ' .. payload .. ' ' .. chunks, num(size) end
  known[gid], accepted[#accepted + 1], gids[#gids + 1], tokens[#tokens + 1] = {'OK', ''}, one, gid, token
  return known[gid]
end

local function replies()
  local found = {}
  for n, answer in ipairs(answers) do found[2 * n - 1], found[2 * n] = answer[1], answer[2] end
  return found
end

for n, one in ipairs(units) do
  answers[n] = judge(one)
  first = first + one.chunks
end
if first ~= #payloads then return refuse('chunks', #payloads .. ' in all', first) end
if #accepted == 0 then return replies() end
local counts = redis.call('HMGET', progress, 'running', 'arrivals', 'produced_samples', 'produced_tokens', 'raw_rewards_sum',
  'raw_rewards_count', 'produced_groups', 'produced_ms', 'failures_in_row', 'filtered_in_row')

redis.call('ZREM', age_index, unpack(gids))
let_go(leases, leased, accepted[1].owner, gids, tokens)
local arrivals, samples, generated, rewards, scores, produced, ms = num(counts[2]), 0, 0, 0, 0, 0, 0
local rows, claimed, last = {expired = 0, resampled = 0, filtered = 0}, 0, accepted[#accepted]
local in_row, stopped_at, unparsed, truncated, ended, ready = num(counts[10]), nil, 0, 0, 0, 0
local now, unneeded, came, went, scored = int(now_ms()), {}, 0, 0, {completed = {}, aborted = {}}
for _, one in ipairs(accepted) do
  local gid, status, record = one.gid, one.status, one.record
  arrivals, samples, generated = arrivals + 1, samples + one.samples, generated + one.tokens
  rewards, scores = rewards + one.reward_sum, scores + one.reward_count
  local arrival = string.format('%010d', arrivals)
  known[gid][2] = arrival
  if status ~= 'aborted' then
    -- a filtered group, too, was generated and judged: its task works
    produced, ms = produced + 1, ms + one.ms
    unparsed, truncated = unparsed + (one.unparsed or 0), truncated + (one.truncated or 0)
  end
  if one.replaced then unneeded[#unneeded + 1], went = one.replaced, went + one.went end
  local kept = one.sampled ~= '' and math.min(one.kept, one.made) or one.made
  local old = math.min(one.old, one.made - kept)
  claimed, rows.expired, rows.resampled = claimed + one.new, rows.expired + old, rows.resampled + one.made - kept - old

  if status == 'filtered' then
    unneeded[#unneeded + 1], unneeded[#unneeded + 2] = gid .. ' init 1', gid .. ' ' .. one.token .. ' ' .. one.chunks
    redis.call('SETBIT', filtered, one.draw, 1)
    rows.filtered = rows.filtered + kept
    redis.call('UNLINK', record)
    went, ended, in_row = went + one.prompt, ended + 1, in_row + 1
    if patience and in_row >= patience then stopped_at = stopped_at or in_row end
  else
    pin(payloads, one.first, one.chunks)
    came = came + one.size
    -- fields that only a running group needs would move the record into a larger size class
    redis.call('HDEL', record, 'token', 'lane', 'entry', 'claimed_ms')
    if one.replaced or one.had_arrival then redis.call('HDEL', record, 'newest', 'cut', 'best', 'counted') end
    redis.call('HSET', record, 'stage', 'pool', 'status', status, 'payload', one.token, 'chunks', one.chunks,
      'size', int(one.size), 'crc', one.crc, 'version', one.version, 'lineage', one.lineage, 'samples', one.samples,
      'arrival', arrival, 'reward', one.reward_sum, 'submitted_ms', now,
      'tokens', int(one.length), 'tries', one.tries, 'made', int(kept),
      unpack(one.fields))
    if one.aged ~= '' then redis.call('HSET', record, 'aged', one.aged) end
    local members = scored[status]
    members[#members + 1], members[#members + 2] = one.score, arrival .. ':' .. gid
    if status == 'completed' then
      in_row, ready = 0, ready + 1
    else
      redis.call('HINCRBY', record, 'aborts', 1)
    end
  end
end
if ready > 0 then redis.call('ZADD', completed, unpack(scored.completed)) end
if #scored.aborted > 0 then redis.call('ZADD', aborted, unpack(scored.aborted)) end
if #unneeded > 0 then redis.call('SADD', garbage, unpack(unneeded)) end
count_bytes(bytes, came, went)
for row, number in pairs(rows) do add_tokens(progress, row, number) end
if last.sampled ~= '' then hear(worker_tokens, progress, task, last.total, last.closed, claimed) end

-- the counters in one call: the cost is that of the call, not of the number of fields
redis.call('HSET', progress, 'running', int(num(counts[1]) - #accepted), 'arrivals', int(arrivals),
  'produced_samples', int(num(counts[3]) + samples), 'produced_tokens', int(num(counts[4]) + generated),
  'raw_rewards_sum', string.format('%.17g', num(counts[5]) + rewards), 'raw_rewards_count', int(num(counts[6]) + scores),
  'produced_groups', int(num(counts[7]) + produced), 'produced_ms', int(num(counts[8]) + ms),
  'failures_in_row', produced > 0 and 0 or num(counts[9]), 'filtered_in_row', in_row)
if unparsed > 0 then redis.call('HINCRBY', progress, 'unparsed', unparsed) end
if truncated > 0 then redis.call('HINCRBY', progress, 'truncated', truncated) end
if ended > 0 then redis.call('HINCRBY', progress, 'filtered', ended) end
keep_counts(progress, num(counts[7]), num(counts[7]) + produced)
if stopped_at then
  stop_task(progress, task, int(stopped_at) .. ' groups in a row were filtered', bell_trainer, events)
end
if ready > 0 then wake(bell_trainer, ready) end
if #accepted > ready then wake(bell_producer, #accepted - ready) end
for _, one in ipairs(accepted) do
  log_event(events, one.status, 'gid', one.gid, 'worker', one.owner, 'version', one.version, 'tokens', int(one.tokens))
end
return replies()
