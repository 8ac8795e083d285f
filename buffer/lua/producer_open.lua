#!lua flags=allow-oom
-- producer_open: become the active producer of a run.
-- KEYS meta HASH, control HASH, events STREAM
-- ARGV run_nonce  ''|token       of the run that this producer expects; '' = any
-- ARGV nonce      token          of this producer
-- ARGV take_over  0|1            1 = even if another one still sends heartbeats
-- ARGV timeout_ms 0..86_400_000  silence after which a holder counts as dead
-- ARGV name       text..128      where it runs, for people
-- replies OK control… | LOST nonce | HELD silent_ms
-- keeps I7 (one producer), I13 (natural key: the nonce)

local actual = redis.call('HGET', meta, 'nonce') or ''
if actual == '' or (run_nonce ~= '' and run_nonce ~= actual) then return {'LOST', actual} end

local holder = redis.call('HMGET', control, 'producer', 'producer_seen_ms')
local now = now_ms()
local silent_ms = silence_ms(now, holder[2])
if (holder[1] or '') ~= '' and holder[1] ~= nonce and silent_ms < timeout_ms and not take_over then
  return {'HELD', int(silent_ms)}
end
redis.call('HSET', control, 'producer', nonce, 'producer_seen_ms', int(now), 'producer_name', name)
if holder[1] ~= nonce then log_event(events, 'producer_opened', 'nonce', nonce, 'name', name) end
return {'OK', unpack(control_state(control))}
