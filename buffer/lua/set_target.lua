#!lua flags=allow-oom
-- set_target: raise the target of a task for which the trainer sets it (an evaluation).
-- include: bells, numbers
-- KEYS control       HASH
-- KEYS progress      HASH  of the task
-- KEYS bell_producer LIST  of the producer
-- ARGV nonce  token  of the trainer
-- ARGV target 0..    groups in all; never lowered
-- replies OK target | FENCED
-- keeps I7, I13 (the target is absolute)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
target = math.max(num(redis.call('HGET', progress, 'target')), target)
redis.call('HSET', progress, 'target', int(target))
ring(bell_producer, 1)
return {'OK', int(target)}
