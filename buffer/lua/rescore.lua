#!lua flags=allow-oom
-- rescore: after a fork at step S, versions above S belong to weights that no longer exist and count as S (or less, if
-- a trainer that opened before died in this: `recovering` is the lowest S).
-- One bounded slice; the last one lets take go on.
-- include: numbers, pool_records
-- KEYS control HASH
-- KEYS groups  prefix  of the group records (HASH)
-- KEYS training_pools  ZSET x0..1024  every pool of every training task
-- ARGV nonce token   of the trainer
-- ARGV step  0..     S
-- ARGV limit 1..500  groups to move at most
-- ARGV lag   ''|0..  steps by which single tokens expire earlier than groups; '' = they do not
-- replies OK moved done | FENCED
-- keeps I8; repeating it changes nothing (I13)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local undone = redis.call('HGET', control, 'recovering')
step = math.min(step, tonumber(undone or step))

-- scores are lower than versions by `lag` at most; a group whose tokens do not age by themselves may count as that much
-- older after a fork: the safe side
local top, moved, found = int(step - (lag or 0)), 0, {}
for i, pool in ipairs(training_pools) do
  if moved >= limit then break end
  -- '(+inf' leaves out groups without a version
  local members = redis.call('ZRANGEBYSCORE', pool, '(' .. top, '(+inf', 'LIMIT', 0, limit - moved)
  local gids, records = records_of(groups, members, 'version')
  found[i] = {members = members, gids = gids, records = records}
  moved = moved + #members
end
for i, pooled in pairs(found) do
  for k, member in ipairs(pooled.members) do
    redis.call('ZADD', training_pools[i], top, member)
    if num(pooled.records[k][1]) > step then redis.call('HSET', groups .. pooled.gids[k], 'version', int(step)) end
  end
end
if moved < limit then redis.call('HDEL', control, 'recovering') end
return {'OK', moved, moved < limit and 1 or 0}
