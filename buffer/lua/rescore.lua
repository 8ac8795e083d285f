#!lua flags=allow-oom
-- rescore: after a fork at step S, count versions above S as S, since their weights no longer exist (or as less, if a
-- trainer that opened before died during this: `recovering` is the lowest S). One bounded slice; the last one permits take.
-- KEYS control HASH, groups prefix
-- KEYS pool    ZSET x0..1024  every pool and age index of every training task
-- ARGV nonce token   of the trainer
-- ARGV step  0..     S
-- ARGV limit 1..500  largest number of groups to move
-- ARGV token_lead ''|0.. xKEYS  of each pool: steps by which single tokens expire earlier than groups; '' = they do not
-- replies OK moved done | FENCED
-- keeps I8; a repeated call changes nothing (I13)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local undone = redis.call('HGET', control, 'recovering')
step = math.min(step, tonumber(undone or step))

-- scores are at most `token_lead` lower than versions; after a fork, a group whose tokens have no age of their own may count as
-- that much older, which is safe
local moved, found = 0, {}
for n, pool, token_lead in each_unit do
  if moved >= limit then break end
  local top = int(step - (token_lead or 0))
  -- '(+inf' excludes groups without a version
  local members = redis.call('ZRANGEBYSCORE', pool, '(' .. top, '(+inf', 'LIMIT', 0, limit - moved)
  local gids, records = records_of(groups, members, 'version')
  found[n] = {pool = pool, top = top, members = members, gids = gids, records = records}
  moved = moved + #members
end
for _, pooled in pairs(found) do
  for _, member in ipairs(pooled.members) do redis.call('ZADD', pooled.pool, pooled.top, member) end
  for k, gid in ipairs(pooled.gids) do
    if num(pooled.records[k][1]) > step then redis.call('HSET', groups .. gid, 'version', int(step)) end
  end
end
if moved < limit then redis.call('HDEL', control, 'recovering') end
return {'OK', moved, moved < limit and 1 or 0}
