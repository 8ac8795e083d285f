#!lua flags=allow-oom
-- receipt: record that a worker has carried out a control epoch. It comes earlier and costs less than a heartbeat.
-- KEYS control HASH*, worker_record HASH*, leased HASH*, bell_receipts LIST*
-- ARGV nonce token  of its registration
-- ARGV ack   0..    control epoch that it has carried out
-- replies OK 9 x control | UNKNOWN (register again) | REPLACED (by another process with this id)
-- keeps I10 (an abort or drain receipt means no leases), I13 (a repeated call is harmless)

local known = redis.call('HMGET', worker_record, 'nonce', 'ack')
if not known[1] then return {'UNKNOWN'} end
if known[1] ~= nonce then return {'REPLACED'} end
local state = control_state(control)
take_receipt(worker_record, num(known[2]), held_count(leased), bell_receipts, state[1], state[2], ack)
return {'OK', unpack(state)}
