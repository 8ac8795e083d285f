#!lua flags=allow-oom
-- halt: the producer says that it starts nothing more of a task, and why, so that nobody waits for it in vain; or takes
-- that back.
-- include: bells, events
-- KEYS[1] control   HASH*
-- KEYS[2] progress  HASH*    of the task
-- KEYS[3] bell      LIST*    of the trainer
-- KEYS[4] events    STREAM*
-- ARGV[1] nonce  token             of the producer
-- ARGV[2] task   name
-- ARGV[3] kind   ''|enough|broken  '' = it goes on | batches up to `step` are what there is | its prompts cannot be drawn
-- ARGV[4] step   0..
-- ARGV[5] reason text..2000
-- replies OK | FENCED
-- keeps I7, I11 (a broken task stops with its reason, the others go on), I13 (absolute)
local control, progress, bell, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local nonce, task, kind, step, reason = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
local before = redis.call('HMGET', progress, 'halt', 'halt_step', 'halt_reason')
if (before[1] or '') == kind and (kind == '' or before[2] == step and before[3] == reason) then return {'OK'} end
redis.call('HSET', progress, 'halt', kind, 'halt_step', step, 'halt_reason', reason)
ring(bell, 1)
log_event(events, 'halt', 'task', task, 'kind', kind, 'step', step, 'reason', string.sub(reason, 1, 60))
return {'OK'}
