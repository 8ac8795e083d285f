#!lua flags=allow-oom
-- rescore: after a fork at step S, versions above S belong to weights that no longer exist and count as S (or less, if
-- a trainer that opened before died in this: `recovering` is the lowest S).
-- One bounded slice; the last one lets take go on.
-- include: numbers, pool_records
-- KEYS[1] control   HASH
-- KEYS[2] groups    prefix of the group records (HASH)
-- KEYS[3+] pool  ZSET x0..1024  every pool of every training task
-- ARGV[1] nonce token   of the trainer
-- ARGV[2] step  0..     S
-- ARGV[3] limit 1..500  groups to move at most
-- ARGV[4] lag   ''|0..  steps by which single tokens expire earlier than groups; '' = they do not
-- replies OK moved done | FENCED
-- keeps I8; repeating it changes nothing (I13)
local control, groups = KEYS[1], KEYS[2]
local nonce, step, limit, lag = ARGV[1], ARGV[2], num(ARGV[3]), num(ARGV[4])
if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local undone = redis.call('HGET', control, 'recovering')
step = int(math.min(tonumber(step), tonumber(undone or step)))

-- scores are lower than versions by `lag` at most; a group whose tokens do not age by themselves may count as that much
-- older after a fork: the safe side
local top, moved, found = int(tonumber(step) - lag), 0, {}
for i = 3, #KEYS do
  if moved >= limit then break end
  -- '(+inf' leaves out groups without a version
  local members = redis.call('ZRANGEBYSCORE', KEYS[i], '(' .. top, '(+inf', 'LIMIT', 0, limit - moved)
  local gids, records = records_of(groups, members, 'version')
  found[i] = {members = members, gids = gids, records = records}
  moved = moved + #members
end
for i, pooled in pairs(found) do
  for k, member in ipairs(pooled.members) do
    redis.call('ZADD', KEYS[i], top, member)
    if num(pooled.records[k][1]) > tonumber(step) then redis.call('HSET', groups .. pooled.gids[k], 'version', step) end
  end
end
if moved < limit then redis.call('HDEL', control, 'recovering') end
return {'OK', moved, moved < limit and 1 or 0}
