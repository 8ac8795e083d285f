#!lua flags=allow-oom
-- deregister: a worker leaves; it has handed everything back.
-- include: events
-- KEYS[1] workers   ZSET
-- KEYS[2] worker    HASH     record of the worker
-- KEYS[3] holds     SET      gids that the worker holds
-- KEYS[4] events    STREAM
-- ARGV[1] worker name   id
-- ARGV[2] nonce  token  of its registration
-- replies OK | HOLDS groups (their leases must run out) | UNKNOWN
-- keeps I2, I13 (repeating it is harmless)
local workers, worker, holds, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', worker, 'nonce') ~= ARGV[2] then return {'UNKNOWN'} end
local held = redis.call('SCARD', holds)
if held > 0 then return {'HOLDS', held} end
redis.call('ZREM', workers, ARGV[1])
redis.call('UNLINK', worker)
log_event(events, 'worker_left', 'worker', ARGV[1])
return {'OK'}
