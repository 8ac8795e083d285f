#!lua flags=allow-oom
-- set_limits: change the limits that all processes of a run share, while it runs.
-- KEYS meta HASH, control HASH, events STREAM, bell_producer LIST
-- ARGV operation token     nonce of this change
-- ARGV version   0..       of the limits that the change is based on
-- ARGV producer  ''|token  nonce of the producer, if it makes the change (what it draws from)
-- ARGV field, value  name, text..65536 x0..64  of meta, as JSON
-- replies OK version | CONFLICT version | FENCED | NO_RUN
-- keeps I7, I13 (operation); compare-and-set, so that two changes at a time do not undo each other

local known = redis.call('HMGET', meta, 'nonce', 'limits_version', 'limits_op')
if not known[1] then return {'NO_RUN'} end
local current = num(known[2])
if known[3] == operation then return {'OK', current} end
if producer ~= '' and redis.call('HGET', control, 'producer') ~= producer then return {'FENCED'} end
if current ~= version then return {'CONFLICT', current} end

for _, field, value in each_unit do
  redis.call('HSET', meta, field, value)
  -- the record of what was set (buffer/run/settings.py) has an event for each value
  if field ~= 'settings' then
    log_event(events, 'set', 'field', field, 'value', string.sub(value, 1, 60), 'version', version + 1)
  end
end
redis.call('HSET', meta, 'limits_version', version + 1, 'limits_op', operation)
wake(bell_producer, 1)
return {'OK', version + 1}
