#!lua flags=allow-oom
-- set_target: raise the target of a task for which the trainer sets it (an evaluation).
-- include: cursors, numbers, wake_ups
-- KEYS control       HASH
-- KEYS progress      HASH  of the task
-- KEYS bell_producer LIST  of the producer
-- KEYS cursors       HASH
-- ARGV nonce  token  of the trainer
-- ARGV task   name
-- ARGV target 0..    groups in all; never lowered
-- replies OK target | FENCED
-- keeps I7, I11 (twice as many problems are drawn at most, however many fail), I13 (the target is absolute)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local before = redis.call('HMGET', progress, 'target', 'consumed')
if target > num(before[1]) then
  local draws_to = next_draw(cursors, task) + 2 * (target - num(before[2]))
  redis.call('HSET', progress, 'target', int(target), 'draws_to', int(draws_to))
else
  target = num(before[1])
end
wake(bell_producer, 1)
return {'OK', int(target)}
