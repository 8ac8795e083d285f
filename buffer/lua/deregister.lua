#!lua flags=allow-oom
-- deregister: remove a worker that has given everything back.
-- include: events, leased
-- KEYS workers       ZSET
-- KEYS worker_record HASH    record of the worker
-- KEYS leased        HASH    what the worker holds
-- KEYS events        STREAM
-- ARGV worker name   id
-- ARGV nonce  token  of its registration
-- replies OK | HOLDS groups (its lease has to run out) | UNKNOWN
-- keeps I2, I13 (a repeated call is harmless)

if redis.call('HGET', worker_record, 'nonce') ~= nonce then return {'UNKNOWN'} end
local held = held_count(leased)
if held > 0 then return {'HOLDS', held} end
redis.call('ZREM', workers, worker)
redis.call('UNLINK', worker_record)
log_event(events, 'worker_left', 'worker', worker)
return {'OK'}
