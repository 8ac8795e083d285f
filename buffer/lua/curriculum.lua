#!lua flags=allow-oom
-- curriculum: record that the function which weighs the tasks failed, or works again. The producer continues with the
-- old weights, so the failure must be visible.
-- include: events, numbers
-- KEYS control HASH*
-- KEYS events  STREAM*
-- ARGV nonce  token       of the producer
-- ARGV step   0..         train step after which it was called
-- ARGV reason text..2000  '' = it works
-- replies OK | FENCED
-- keeps I7, I13 (absolute)

local known = redis.call('HMGET', control, 'producer', 'curriculum_step', 'curriculum_error')
if known[1] ~= nonce then return {'FENCED'} end
if (known[3] or '') == reason and (reason == '' or known[2] == int(step)) then return {'OK'} end
redis.call('HSET', control, 'curriculum_step', int(step), 'curriculum_error', reason)
log_event(events, 'curriculum', 'step', int(step), 'reason', string.sub(reason, 1, 60))
return {'OK'}
