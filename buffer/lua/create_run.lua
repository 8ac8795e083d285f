#!lua
-- create_run: make a run, once; or bring its limits up to date, and let a finished one go on (it has more steps now).
-- The nonce tells this run from any other of the same name, before or after.
-- include: clock, control_changes, events, numbers
-- KEYS[1] meta      HASH
-- KEYS[2] control   HASH
-- KEYS[3] ledger    HASH    of the trainer
-- KEYS[4] events    STREAM
-- ARGV[1] nonce   token       128 random bits, hex
-- ARGV[2] schema  name        version of keys and scripts
-- ARGV[3] weights weights     "lineage:version" of the initial weights
-- ARGV[4] path    text..4096  where they are
-- ARGV[5+] field, value name, text..65536 x0..64  limits of the run, for meta
-- replies OK (made now or before; limits are set) | EXISTS nonce created_ms schema
-- keeps I6 (a run is known by its nonce), I13 (natural key: the nonce)
local meta, control, ledger, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local nonce, schema, weights, path = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local known = redis.call('HMGET', meta, 'nonce', 'created_ms', 'schema')
if known[1] and known[1] ~= nonce then return {'EXISTS', known[1], known[2], known[3]} end

local changes = 0
for i = 5, #ARGV - 1, 2 do
  if redis.call('HGET', meta, ARGV[i]) ~= ARGV[i + 1] then changes = changes + 1 end
  redis.call('HSET', meta, ARGV[i], ARGV[i + 1])
end
-- processes that are still there from before take them over
if known[1] and changes > 0 then
  redis.call('HINCRBY', meta, 'limits_version', 1)
  redis.call('HSET', meta, 'limits_op', 'file-' .. int(now_ms()))
end
if known[1] then
  if redis.call('HGET', control, 'trainer_mode') == 'finish' then
    redis.call('HSET', control, 'trainer_mode', 'run', 'trainer_lanes', 'eval resume fresh')
    settle_mode(control)
  end
  return {'OK'}
end
redis.call('HSET', meta, 'nonce', nonce, 'schema', schema, 'created_ms', int(now_ms()))
redis.call('HSET', control, 'epoch', 1, 'mode', 'run', 'lanes', 'eval resume fresh',
  'trainer_mode', 'run', 'operator_mode', 'run', 'weights', weights, 'weights_path', path)
redis.call('HSET', ledger, 'taken', 0, 'committed', 0, 'freed', 0)
log_event(events, 'created', 'nonce', nonce)
return {'OK'}
