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
local refused = refuse_role(control, 'producer', nonce, timeout_ms, take_over)
if refused then return refused end
local is_new = redis.call('HGET', control, 'producer') ~= nonce
redis.call('HSET', control, 'producer', nonce, 'producer_seen_ms', int(now_ms()), 'producer_name', name)
if is_new then log_event(events, 'producer_opened', 'nonce', nonce, 'name', name) end
return {'OK', unpack(control_state(control))}
