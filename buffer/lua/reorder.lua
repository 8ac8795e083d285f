#!lua flags=allow-oom
-- reorder: put groups that are ready, but not in the index of the run's order, in front of all others, by arrival.
-- One bounded slice; an index of another policy is thrown away first.
-- include: numbers
-- KEYS[1] control   HASH
-- KEYS[2] progress  HASH     of the task
-- KEYS[3] pool      ZSET     completed
-- KEYS[4] order     ZSET
-- ARGV[1] nonce  token   of the trainer
-- ARGV[2] policy policy  order policy of the run
-- ARGV[3] start  0..     rank in the pool to look from
-- ARGV[4] limit  1..500  groups to look at
-- replies OK scanned | FENCED
-- keeps I1 (the index holds what the pool holds), I7, I13 (repeating it finds nothing)
local control, progress, pool, order = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local nonce, policy, start, limit = ARGV[1], ARGV[2], num(ARGV[3]), num(ARGV[4])
if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local by = redis.call('HGET', progress, 'order_by')
if by ~= policy then
  if by then
    redis.call('UNLINK', order)
    redis.call('HDEL', progress, 'order_round')
  end
  redis.call('HSET', progress, 'order_by', policy)
end
local members = redis.call('ZRANGE', pool, start, start + limit - 1)
for _, member in ipairs(members) do redis.call('ZADD', order, 'NX', '-inf', member) end
return {'OK', #members}
