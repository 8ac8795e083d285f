#!lua flags=allow-oom
-- forget: free payloads and manifests of archived batches beyond the retention. Any process may call it.
-- KEYS ledger HASH, batches prefix, garbage SET, events STREAM, bell_producer LIST, bell_workers LIST
-- KEYS bytes HASH
-- ARGV retain   0..      archived batches that are kept
-- ARGV wait     0|1      1 = none is freed before it was exported
-- ARGV exported 0..      batches up to this one were copied elsewhere; never lowered
-- ARGV limit    1..1000  largest number of groups
-- replies OK forgotten left batches  (newest step that is freed; batches left; batches freed by this call)
-- keeps I6 (only what commit has archived), I12, I13 (a repeated call finds nothing)

local steps = redis.call('HMGET', ledger, 'freed', 'forgotten', 'exported')
local forgotten, before, went = num(steps[2]), num(steps[2]), 0
exported = math.max(exported, num(steps[3]))
local last = num(steps[1]) - retain
if wait then last = math.min(last, exported) end
-- read first: a wrong type stops the script before it writes
for step = forgotten + 1, math.min(last, forgotten + limit) do redis.call('LLEN', batches .. int(step)) end

while forgotten < last and limit > 0 do
  local batch, payloads = batches .. int(forgotten + 1), {}
  local length = redis.call('LLEN', batch)
  local count = math.min(limit, math.max(0, length - 1))
  if count > 0 then
    -- from the end, so that the rest is still a manifest
    for i, entry in ipairs(redis.call('LRANGE', batch, -count, -1)) do
      local payload, size = string.match(entry, '^(%S+ %S+ %S+) (%S+)')
      payloads[i], went = payload, went + num(size)
    end
    redis.call('SADD', garbage, unpack(payloads))
    redis.call('LTRIM', batch, 0, -1 - count)
  end
  limit = limit - count - 1
  if length - count <= 1 then
    redis.call('UNLINK', batch)
    forgotten = forgotten + 1
  end
end
if went > 0 then
  count_bytes(bytes, 0, went)
  -- producers and workers that were refused for lack of memory wait for this
  wake(bell_producer, 1)
  wake(bell_workers, 8)
end
if exported > num(steps[3]) then redis.call('HSET', ledger, 'exported', int(exported)) end
if forgotten > before then
  redis.call('HSET', ledger, 'forgotten', int(forgotten))
  log_event(events, 'forgotten', 'step', int(forgotten))
end
return {'OK', int(forgotten), int(math.max(0, last - forgotten)), int(forgotten - before)}
