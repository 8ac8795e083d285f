#!lua flags=allow-oom
-- rescore: after a fork at step S, versions above S belong to weights that no longer exist and count as S.
-- One bounded slice; the last one lets take go on.
-- KEYS[1] control   HASH
-- KEYS[2] groups    prefix of the group records (HASH)
-- KEYS[3+] pool     ZSET, every pool of every training task
-- ARGV[1] nonce     of the trainer
-- ARGV[2] step      S
-- ARGV[3] limit     groups to move at most
-- replies OK moved done | FENCED
-- keeps I8; repeating it changes nothing (I13)
local control, groups = KEYS[1], KEYS[2]
local nonce, step, limit = ARGV[1], ARGV[2], num(ARGV[3])
if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end

local moved = 0
for i = 3, #KEYS do
  if moved >= limit then break end
  -- '(+inf' leaves out groups without a version
  local members = redis.call('ZRANGEBYSCORE', KEYS[i], '(' .. step, '(+inf', 'LIMIT', 0, limit - moved)
  for _, member in ipairs(members) do
    redis.call('ZADD', KEYS[i], step, member)
    redis.call('HSET', groups .. string.match(member, ':(.*)$'), 'version', step)
  end
  moved = moved + #members
end
if moved < limit then redis.call('HDEL', control, 'recovering') end
return {'OK', moved, moved < limit and 1 or 0}
