#!lua flags=allow-oom
-- set_limits: change what all processes of a run must agree on, while it goes on.
-- include: bells, events, numbers
-- KEYS[1] meta      HASH
-- KEYS[2] control   HASH
-- KEYS[3] events    STREAM
-- KEYS[4] bell      LIST     of the producer
-- ARGV[1] operation  token  nonce of this change
-- ARGV[2] version    0..    of the limits that the change was made from
-- ARGV[3] producer   ''|token  who changes it, if that is the producer (a curriculum)
-- ARGV[4+] field, value name, text..65536 x0..64  of meta, as JSON
-- replies OK version | CONFLICT version | FENCED | NO_RUN
-- keeps I7, I13 (operation); compare-and-set, so that two who change at once do not undo each other
local meta, control, events, bell = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local operation, expected, producer = ARGV[1], num(ARGV[2]), ARGV[3]

local known = redis.call('HMGET', meta, 'nonce', 'limits_version', 'limits_op')
if not known[1] then return {'NO_RUN'} end
local version = num(known[2])
if known[3] == operation then return {'OK', version} end
if producer ~= '' and redis.call('HGET', control, 'producer') ~= producer then return {'FENCED'} end
if version ~= expected then return {'CONFLICT', version} end

for i = 4, #ARGV - 1, 2 do
  redis.call('HSET', meta, ARGV[i], ARGV[i + 1])
  log_event(events, 'set', 'field', ARGV[i], 'value', string.sub(ARGV[i + 1], 1, 60), 'version', version + 1)
end
redis.call('HSET', meta, 'limits_version', version + 1, 'limits_op', operation)
ring(bell, 1)
return {'OK', version + 1}
