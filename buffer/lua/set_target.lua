#!lua flags=allow-oom
-- set_target: let an evaluation draw its problems, each once.
-- KEYS control HASH, progress HASH, bell_producer LIST
-- ARGV nonce  token  of the trainer
-- ARGV begins 0..    first draw of the evaluation
-- ARGV target 0..    draw behind its last one; never lowered
-- replies OK target | FENCED
-- keeps I7, I13 (the target is absolute)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local before = num(redis.call('HGET', progress, 'target'))
if target > before then redis.call('HSET', progress, 'begins', int(begins), 'target', int(target)) end
wake(bell_producer, 1)
return {'OK', int(math.max(target, before))}
