#!lua flags=allow-oom
-- beat: record that the trainer or the producer is alive, or that it closes its role.
-- KEYS control HASH*
-- ARGV role          trainer|producer
-- ARGV nonce         token             of the holder
-- ARGV closing       0|1               1 = close the role
-- ARGV waited_ms     0..               time that it has waited for groups since it opened, by its own clock
-- ARGV pause_ms      0..               total time of its pauses, from the call to the last receipt
-- ARGV pause_buckets ''|text..256      number of pauses by time: counts by PAUSE_BOUNDS_S of buffer/control/worker_record.py
-- ARGV turns         0..               turns of its own loop; a heartbeat of its thread adds none
-- ARGV doing         ''|text..256      what its loop is busy with; '' = nothing for long
-- ARGV doing_ms      0..               for how long
-- replies OK control… | FENCED
-- keeps I7 (a fenced holder receives FENCED), I13 (a repeated call changes nothing)

if closing and redis.call('HGET', control, role .. '_closed') == nonce then return {'OK', unpack(control_state(control))} end
if redis.call('HGET', control, role) ~= nonce then return {'FENCED'} end
redis.call('HSET', control, role .. '_seen_ms', int(now_ms()), role .. '_waited_ms', int(waited_ms),
  role .. '_pause_ms', int(pause_ms), role .. '_pause_buckets', pause_buckets,
  role .. '_turns', int(turns), role .. '_doing', doing, role .. '_doing_ms', int(doing_ms))
if closing then redis.call('HSET', control, role, '', role .. '_closed', nonce) end
return {'OK', unpack(control_state(control))}
