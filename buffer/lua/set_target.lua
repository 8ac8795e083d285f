#!lua flags=allow-oom
-- set_target: the trainer asks for more groups of a task whose target it sets itself (an evaluation).
-- include: bells, numbers
-- KEYS[1] control   HASH
-- KEYS[2] progress  HASH     of the task
-- KEYS[3] bell      LIST     of the producer
-- ARGV[1] nonce  token  of the trainer
-- ARGV[2] target 0..    groups in all; never lowered
-- replies OK target | FENCED
-- keeps I7, I13 (the target is absolute)
local control, progress, bell = KEYS[1], KEYS[2], KEYS[3]
if redis.call('HGET', control, 'trainer') ~= ARGV[1] then return {'FENCED'} end
local target = math.max(num(redis.call('HGET', progress, 'target')), num(ARGV[2]))
redis.call('HSET', progress, 'target', int(target))
ring(bell, 1)
return {'OK', int(target)}
