#!lua flags=allow-oom
-- beat: record that the trainer or the producer is alive, or that it closes its role. A server that lost the trainer's last
-- change of its mode, such as the end of a pause, learns it again.
-- KEYS control HASH*     and the channel that carries the hint
-- KEYS events STREAM, bell_producer LIST
-- ARGV role          trainer|producer
-- ARGV nonce         token             of the holder
-- ARGV closing       0|1               1 = close the role
-- ARGV waited_ms     0..               time that it has waited for groups since it opened, by its own clock
-- ARGV pause_ms      0..               total time of its pauses, from the call to the last receipt
-- ARGV pause_buckets ''|text..256      number of pauses by time: counts by PAUSE_BOUNDS_S of buffer/control/worker_record.py
-- ARGV turns         0..               turns of its own loop; a heartbeat of its thread adds none
-- ARGV doing         ''|text..256      what its loop is busy with; '' = nothing for long
-- ARGV doing_ms      0..               for how long
-- ARGV change        0..               number of the trainer's last change of its mode since it opened; 0 = none
-- ARGV mode          ''|run|drain|abort|keep|finish
-- ARGV lanes         lanes             that it left open
-- replies OK control… | FENCED
-- keeps I7 (a fenced holder receives FENCED), I10, I13 (a repeated call changes nothing)

if closing and redis.call('HGET', control, role .. '_closed') == nonce then return {'OK', unpack(control_state(control))} end
if redis.call('HGET', control, role) ~= nonce then return {'FENCED'} end
redis.call('HSET', control, role .. '_seen_ms', int(now_ms()), role .. '_waited_ms', int(waited_ms),
  role .. '_pause_ms', int(pause_ms), role .. '_pause_buckets', pause_buckets,
  role .. '_turns', int(turns), role .. '_doing', doing, role .. '_doing_ms', int(doing_ms))
if change > num(redis.call('HGET', control, 'trainer_change')) then
  redis.call('HSET', control, 'trainer_mode', mode, 'trainer_lanes', lanes, 'trainer_change', int(change))
  local epoch, effective = settle_mode(control)
  wake(bell_producer, 1)
  log_event(events, 'control', 'epoch', epoch, 'mode', effective, 'by', role)
end
if closing then redis.call('HSET', control, role, '', role .. '_closed', nonce) end
return {'OK', unpack(control_state(control))}
