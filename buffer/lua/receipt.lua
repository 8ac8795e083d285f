#!lua flags=allow-oom
-- receipt: a worker has carried out a control epoch, and says only that: it comes sooner and costs less than a heartbeat.
-- include: control_state, numbers, receipts
-- KEYS[1] control   HASH*
-- KEYS[2] worker    HASH*    record of the worker
-- KEYS[3] holds     SET      gids that the worker holds
-- KEYS[4] bell      LIST*    of whoever waits for receipts
-- ARGV[1] nonce    token     of its registration
-- ARGV[2] ack      0..       control epoch that it has carried out
-- replies OK 6 x control | UNKNOWN (register again) | REPLACED (by another process with this id)
-- keeps I10 (an abort or drain receipt means no leases), I13 (repeating it is harmless)
local control, worker, holds, bell = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local nonce, ack = ARGV[1], num(ARGV[2])
local known = redis.call('HGET', worker, 'nonce')
if not known then return {'UNKNOWN'} end
if known ~= nonce then return {'REPLACED'} end
local state = control_state(control)
take_receipt(worker, holds, bell, state[1], state[2], ack)
return {'OK', unpack(state)}
