#!lua flags=allow-oom
-- beat: the trainer or the producer is alive, or closes its role.
-- include: clock, control_state, numbers
-- KEYS control HASH*
-- ARGV role          trainer|producer
-- ARGV nonce         token             of the holder
-- ARGV closing       0|1               1 = give the role up
-- ARGV waited_ms     0..               how long it has waited for groups since it opened, by its own clock
-- ARGV pause_ms      0..               how long its pauses took together, from the call to the last receipt
-- ARGV pause_buckets ''|text..256      how many pauses took how long: counts by PAUSE_BOUNDS_S of buffer/control/histogram.py
-- replies OK control… | FENCED
-- keeps I7 (a fenced holder learns of it), I13 (repeating it changes nothing)

if closing and redis.call('HGET', control, role .. '_closed') == nonce then return {'OK', unpack(control_state(control))} end
if redis.call('HGET', control, role) ~= nonce then return {'FENCED'} end
redis.call('HSET', control, role .. '_seen_ms', int(now_ms()), role .. '_waited_ms', int(waited_ms),
  role .. '_pause_ms', int(pause_ms), role .. '_pause_buckets', pause_buckets)
if closing then redis.call('HSET', control, role, '', role .. '_closed', nonce) end
return {'OK', unpack(control_state(control))}
