#!lua
-- create_run: create a run, once; or update its limits, and continue a finished one (which has more steps now).
-- The nonce distinguishes this run from others of the same name.
-- reopen 0: a finished run has nothing left to do, and stays finished.
-- KEYS meta HASH, control HASH, ledger HASH, events STREAM
-- ARGV nonce     token       128 random bits, hex
-- ARGV schema    name        version of keys and scripts
-- ARGV weights   weights     "lineage:version" of the initial weights
-- ARGV path      text..4096  where they are
-- ARGV operation token       nonce of this call
-- ARGV version   ''|0..      of the limits that these are based on; '' = there was no run
-- ARGV reopen    0|1
-- ARGV continues ''|token    of the checkpoint that a cleared run continues (see regenerate.lua); '' = none
-- ARGV field, value  name, text..65536 x0..64  limits of the run, for meta
-- replies OK (created now or before; limits are set) | EXISTS nonce created_ms schema | DAMAGED (meta is gone) | CONFLICT (read the run again)
--       | CLEARED (without what it continues, it would train again what was trained)
-- keeps I6 (a run is known by its nonce), I13 (operation); compare-and-set, so that no change is undone unseen

local known = redis.call('HMGET', meta, 'nonce', 'created_ms', 'schema', 'limits_version', 'limits_op')
if known[1] and known[1] ~= nonce then return {'EXISTS', known[1], known[2], known[3]} end
if known[3] == 'regenerating' then
  if continues == '' then return {'CLEARED'} end
  redis.call('UNLINK', meta)
  known = {}
end
-- what is left of a run whose meta is gone is not a new run: its batches would be trained again
if not known[1] and redis.call('EXISTS', control, ledger) > 0 then return {'DAMAGED'} end
if known[1] and known[5] == operation then return {'OK'} end
local current = num(known[4])
if known[1] and version ~= current then return {'CONFLICT'} end

local changes = 0
for _, field, value in each_unit do
  if redis.call('HGET', meta, field) ~= value then
    changes = changes + 1
    -- the record of what was set (buffer/run/settings.py) has an event for each value
    if known[1] and field ~= 'settings' then
      log_event(events, 'set', 'field', field, 'value', string.sub(value, 1, 60), 'version', int(current + 1))
    end
  end
  redis.call('HSET', meta, field, value)
end
-- processes that still run from before adopt them
if known[1] and changes > 0 then
  redis.call('HSET', meta, 'limits_version', int(current + 1), 'limits_op', operation)
end
if known[1] then
  if reopen and redis.call('HGET', control, 'trainer_mode') == 'finish' then
    redis.call('HSET', control, 'trainer_mode', 'run', 'trainer_lanes', 'eval resume fresh')
    settle_mode(control)
  end
  return {'OK'}
end
redis.call('HSET', meta, 'nonce', nonce, 'schema', schema, 'created_ms', int(now_ms()), 'limits_op', operation)
if continues ~= '' then redis.call('HSET', meta, 'continues', continues) end
redis.call('HSET', control, 'epoch', 1, 'mode', 'run', 'lanes', 'eval resume fresh',
  'trainer_mode', 'run', 'operator_mode', 'run', 'weights', weights, 'weights_path', path)
redis.call('HSET', ledger, 'taken', 0, 'committed', 0, 'freed', 0)
log_event(events, 'created', 'nonce', nonce)
return {'OK'}
