#!lua flags=allow-oom
-- reorder: put ready groups that are not in the index of the run's order before all others, by arrival.
-- One bounded slice. An index of another policy is deleted first.
-- include: numbers
-- KEYS control     HASH
-- KEYS progress    HASH  of the task
-- KEYS completed   ZSET  completed
-- KEYS order_index ZSET
-- ARGV nonce  token   of the trainer
-- ARGV policy policy  order policy of the run
-- ARGV start  0..     first rank in the pool to scan
-- ARGV limit  1..500  largest number of groups to scan
-- replies OK scanned | FENCED
-- keeps I1 (the index holds what the pool holds), I7, I13 (a repeated call finds nothing)

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
local first = {}
for i, member in ipairs(members) do first[2 * i - 1], first[2 * i] = '-inf', member end
if #members > 0 then redis.call('ZADD', order_index, 'NX', unpack(first)) end
return {'OK', #members}
