#!lua flags=allow-oom
-- control: change the mode of a run. Trainer (around weight updates) and operator have a mode each: the operator's pause
-- survives the trainer's continue. If both pause, the stricter mode applies, with the lanes that both leave open.
-- KEYS control       HASH    and the channel that carries the hint
-- KEYS events STREAM, bell_producer LIST
-- ARGV operation token                        nonce of this change
-- ARGV who       trainer|operator
-- ARGV mode      run|drain|abort|keep|finish
-- ARGV lanes     lanes                        that are open, separated by spaces
-- ARGV nonce     ''|token                     of the trainer; '' for the operator
-- ARGV change    0..                          number of this change of the trainer's mode since it opened; 0: the operator's
-- ARGV orphan_ms ''|0..86_400_000             of the operator's run: it also ends the pause of a trainer that closed
--                   or was silent for that time; '' = it does not
-- replies OK 9 x control | FENCED | NO_RUN
-- keeps I7, I10 (the epoch decides; the message only makes it faster), I13 (operation)

if redis.call('EXISTS', control) == 0 then return {'NO_RUN'} end
if who == 'trainer' and redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
if not begin_operation(control, who .. '_ops', operation) then return {'OK', unpack(control_state(control))} end

redis.call('HSET', control, who .. '_mode', mode, who .. '_lanes', lanes)
if who == 'trainer' then redis.call('HSET', control, 'trainer_change', int(change)) end
local trainer = redis.call('HMGET', control, 'trainer', 'trainer_seen_ms', 'trainer_mode')
local is_gone = (trainer[1] or '') == '' or silence_ms(now_ms(), trainer[2]) >= (orphan_ms or math.huge)
if orphan_ms and mode == 'run' and is_gone and trainer[3] ~= 'finish' then
  redis.call('HSET', control, 'trainer_mode', 'run', 'trainer_lanes', lanes)
end
local epoch, effective = settle_mode(control)
-- no wake-up for workers, who receive the hint: 64 more claims would delay the producer, for which they wait
wake(bell_producer, 1)
log_event(events, 'control', 'epoch', epoch, 'mode', effective, 'by', who)
return {'OK', unpack(control_state(control))}
