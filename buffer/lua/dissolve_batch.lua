#!lua flags=allow-oom
-- dissolve_batch: the last batch that was taken is not one of the trainer's history: its groups are ready again.
-- KEYS[1] control   HASH
-- KEYS[2] ledger    HASH
-- KEYS[3] batch     LIST     the manifest of this step
-- KEYS[4] groups    prefix of the group records (HASH)
-- KEYS[5] pools     prefix of the pools (ZSET)
-- KEYS[6] progress  prefix of the tasks' accounts (HASH)
-- KEYS[7] events    STREAM
-- ARGV[1] nonce  token  of the trainer
-- ARGV[2] step   1..    T: the last one taken
-- ARGV[3] lag    ''|0..  steps by which single tokens expire earlier than groups; '' = they do not
-- replies OK taken | FENCED | GAP taken | ARCHIVED freed (it is, or is about to be)
-- keeps I1 (an order index is filled again by `reorder`), I6, I7, I8 (`rescore` follows), I13 (step)
local control, ledger, batch, groups, pools, progress, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local nonce, step, lag = ARGV[1], num(ARGV[2]), ARGV[3]

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'freed', 'keep')
local taken, freed = num(steps[1]), math.max(num(steps[2]), num(steps[3]))
if step > taken then return {'OK', int(taken)} end
if step < taken then return {'GAP', int(taken)} end
if step <= freed then return {'ARCHIVED', int(freed)} end

local entries = redis.call('LRANGE', batch, 1, -1)
for _, entry in ipairs(entries) do
  local gid = string.match(entry, '^(%S+)')
  local task, record = string.match(gid, '^(.*)%-%d+$'), groups .. gid
  local held = redis.call('HMGET', record, 'arrival', 'version', 'last')
  redis.call('HDEL', record, 'batch')
  redis.call('HSET', record, 'stage', 'pool', 'status', 'completed')
  redis.call('ZADD', pools .. task .. ':completed', pool_score(held[2], held[3], lag), held[1] .. ':' .. gid)
  redis.call('HINCRBY', progress .. task, 'taken', -1)
  redis.call('HINCRBY', progress .. task, 'consumed', -1)
end
redis.call('UNLINK', batch)
redis.call('HSET', ledger, 'taken', int(step - 1))
redis.call('HSET', control, 'trainer_seen_ms', int(now_ms()))
log_event(events, 'dissolved', 'step', int(step), 'groups', #entries)
return {'OK', int(step - 1)}
