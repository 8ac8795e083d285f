#!lua flags=allow-oom
-- halt: record that the producer starts no more groups of a task, and why, so that no process waits in vain; or that
-- it starts them again.
-- KEYS control HASH*, progress HASH*, bell_trainer LIST*, events STREAM*
-- ARGV operation token          nonce of this report
-- ARGV nonce  token             of the producer
-- ARGV task   name
-- ARGV kind   ''|enough|broken  '' = it continues | there are only batches up to `step` | its prompts cannot be drawn
-- ARGV step   0..
-- ARGV reason text..2000
-- replies OK | FENCED
-- keeps I7, I11 (a broken task stops with its reason, the others go on), I13 (operation)

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
if not begin_operation(progress, 'halt_ops', operation) then return {'OK'} end
local before = redis.call('HMGET', progress, 'halt', 'halt_step', 'halt_reason')
if (before[1] or '') == kind and (kind == '' or before[2] == int(step) and before[3] == reason) then return {'OK'} end
redis.call('HSET', progress, 'halt', kind, 'halt_step', int(step), 'halt_reason', reason)
wake(bell_trainer, 1)
log_event(events, 'halt', 'task', task, 'kind', kind, 'step', int(step), 'reason', string.sub(reason, 1, 60))
return {'OK'}
