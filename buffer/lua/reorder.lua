#!lua flags=allow-oom
-- reorder: put groups that are ready, but not in the index of the run's order, in front of all others, by arrival.
-- One bounded slice; an index of another policy is thrown away first.
-- include: numbers
-- KEYS control     HASH
-- KEYS progress    HASH  of the task
-- KEYS completed   ZSET  completed
-- KEYS order_index ZSET
-- ARGV nonce  token   of the trainer
-- ARGV policy policy  order policy of the run
-- ARGV start  0..     rank in the pool to look from
-- ARGV limit  1..500  groups to look at
-- replies OK scanned | FENCED
-- keeps I1 (the index holds what the pool holds), I7, I13 (repeating it finds nothing)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local by = redis.call('HGET', progress, 'order_by')
if by ~= policy then
  if by then
    redis.call('UNLINK', order_index)
    redis.call('HDEL', progress, 'order_round')
  end
  redis.call('HSET', progress, 'order_by', policy)
end
local members = redis.call('ZRANGE', completed, int(start), int(start + limit - 1))
for _, member in ipairs(members) do redis.call('ZADD', order_index, 'NX', '-inf', member) end
return {'OK', #members}
