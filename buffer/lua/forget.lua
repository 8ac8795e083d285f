#!lua flags=allow-oom
-- forget: free the payloads and manifests of archived batches that fell out of what is retained. Anybody may call it.
-- KEYS[1] ledger    HASH
-- KEYS[2] batches   prefix of the manifests (LIST)
-- KEYS[3] garbage   SET
-- KEYS[4] events    STREAM
-- ARGV[1] retain    archived batches that are kept
-- ARGV[2] wait      1 = and none is freed before it was exported
-- ARGV[3] exported  batches up to this one were copied elsewhere; never lowered
-- ARGV[4] limit     groups at most
-- replies OK forgotten left
-- keeps I6 (only what commit has archived), I12, I13 (repeating it finds nothing)
local ledger, batches, garbage, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local retain, wait, exported, limit = num(ARGV[1]), ARGV[2] == '1', num(ARGV[3]), num(ARGV[4])

local steps = redis.call('HMGET', ledger, 'freed', 'forgotten', 'exported')
local forgotten, before = num(steps[2]), num(steps[2])
exported = math.max(exported, num(steps[3]))
local last = num(steps[1]) - retain
if wait then last = math.min(last, exported) end

while forgotten < last and limit > 0 do
  local batch = batches .. int(forgotten + 1)
  -- from the end, so that what is left is still a manifest
  local entries = {}
  if redis.call('LLEN', batch) > 1 then
    entries = redis.call('LRANGE', batch, math.max(-limit, 1 - redis.call('LLEN', batch)), -1)
  end
  for _, entry in ipairs(entries) do
    local gid, token, chunks = string.match(entry, '^(%S+) (%S+) (%S+)')
    redis.call('SADD', garbage, gid .. ' ' .. token .. ' ' .. chunks)
  end
  if #entries > 0 then redis.call('LTRIM', batch, 0, -1 - #entries) end
  limit = limit - #entries - 1
  if redis.call('LLEN', batch) <= 1 then
    redis.call('UNLINK', batch)
    forgotten = forgotten + 1
  end
end
if exported > num(steps[3]) then redis.call('HSET', ledger, 'exported', int(exported)) end
if forgotten > before then
  redis.call('HSET', ledger, 'forgotten', int(forgotten))
  log_event(events, 'forgotten', 'step', int(forgotten))
end
return {'OK', int(forgotten), int(math.max(0, last - forgotten))}
