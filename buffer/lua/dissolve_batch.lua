#!lua flags=allow-oom
-- dissolve_batch: return the groups of the last taken batch to their pools, since it is not in the trainer's history.
-- KEYS control HASH, ledger HASH, batch LIST, groups prefix, pools prefix, accounts prefix, events STREAM
-- KEYS lineages LIST
-- ARGV nonce token   of the trainer
-- ARGV step  1..     T: the last one taken
-- ARGV task, token_lead  name, ''|0.. x0..256  of each training task: steps by which single tokens expire earlier than groups;
--                     '' = they do not
-- replies OK taken | FENCED | GAP taken | ARCHIVED freed (now, or soon)
-- keeps I1, I6, I7, I8 (every fork since the batch was taken counts), I13 (step)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'freed', 'keep')
local taken, freed = num(steps[1]), math.max(num(steps[2]), num(steps[3]))
if step > taken then return {'OK', int(taken)} end
if step < taken then return {'GAP', int(taken)} end
if step <= freed then return {'ARCHIVED', int(freed)} end

-- versions are clamped on the way to a pool, and by `rescore` in pools: for these groups, forks since then count here
local function living(lineage, version)
  return (version or '') == '' and '' or living_version(lineages, lineage, version)
end

local entries, groups_of, token_leads = {}, {}, {}
for _, task, token_lead in each_unit do token_leads[task] = token_lead end
for i, line in ipairs(redis.call('LRANGE', batch, 1, -1)) do
  local gid = string.match(line, '^(%S+)')
  local task, record = string.match(gid, '^(.*)%-%d+$'), groups .. gid
  local held = redis.call('HMGET', record, 'arrival', 'version', 'lineage', 'last', 'last_lineage')
  entries[i] = {task = task, record = record, member = held[1] .. ':' .. gid, version = living(held[3], held[2]),
    last = living(held[5], held[4])}
  groups_of[task] = (groups_of[task] or 0) + 1
end
for task in pairs(groups_of) do
  -- read first: a wrong type stops the script before it writes
  redis.call('ZCARD', pools .. task .. ':completed')
  redis.call('HLEN', accounts .. task)
end
for _, entry in ipairs(entries) do
  local task, record, version, last = entry.task, entry.record, entry.version, entry.last
  redis.call('HDEL', record, 'batch')
  redis.call('HSET', record, 'stage', 'pool', 'status', 'completed', 'version', version)
  if last ~= '' then redis.call('HSET', record, 'last', last) end
  redis.call('ZADD', pools .. task .. ':completed', pool_score(version, last, token_leads[task]), entry.member)
end
for task, number in pairs(groups_of) do
  for _, counter in ipairs({'taken', 'consumed'}) do redis.call('HINCRBY', accounts .. task, counter, -number) end
end
redis.call('UNLINK', batch)
redis.call('HSET', ledger, 'taken', int(step - 1))
redis.call('HSET', control, 'trainer_seen_ms', int(now_ms()))
log_event(events, 'dissolved', 'step', int(step), 'groups', #entries)
return {'OK', int(step - 1)}
