#!lua flags=allow-oom
-- beat: the trainer or the producer is alive, or closes its role.
-- include: clock, control_state, numbers
-- KEYS[1] control   HASH*
-- ARGV[1] role    trainer|producer
-- ARGV[2] nonce   token             of the holder
-- ARGV[3] closing 0|1               1 = give the role up
-- ARGV[4] waited_ms 0..             how long it has waited for groups since it opened, by its own clock
-- replies OK control… | FENCED
-- keeps I7 (a fenced holder learns of it), I13 (repeating it changes nothing)
local control, role, nonce = KEYS[1], ARGV[1], ARGV[2]
local closing = ARGV[3] == '1'
if closing and redis.call('HGET', control, role .. '_closed') == nonce then return {'OK', unpack(control_state(control))} end
if redis.call('HGET', control, role) ~= nonce then return {'FENCED'} end
redis.call('HSET', control, role .. '_seen_ms', int(now_ms()), role .. '_waited_ms', int(tonumber(ARGV[4])))
if closing then redis.call('HSET', control, role, '', role .. '_closed', nonce) end
return {'OK', unpack(control_state(control))}
