-- payloads: the bytes of groups: counted, kept, and bounded (I12, I14).

-- Payload bytes of all groups, as cumulative counters: held bytes are `came` less `went`.
local function count_bytes(bytes, came, went)
  if came > 0 then redis.call('HINCRBY', bytes, 'came', int(came)) end
  if went > 0 then redis.call('HINCRBY', bytes, 'went', int(went)) end
end

local function held_bytes(bytes)
  local counts = redis.call('HMGET', bytes, 'came', 'went')
  return num(counts[1]) - num(counts[2])
end

-- Whether the held bytes have reached the mark; 0 = there is no mark.
local function is_full(bytes, byte_limit) return byte_limit > 0 and held_bytes(bytes) >= byte_limit end

-- Whether no group may be started for lack of memory. If no group runs, and no checkpoint would free a batch, the wait
-- would never end: then a few are started nevertheless.
local function is_refused(bytes, byte_limit, leases, training)
  if not is_full(bytes, byte_limit) then return false end
  local steps = redis.call('HMGET', training, 'taken', 'freed')
  return redis.call('ZCARD', leases) > 0 or num(steps[1]) > num(steps[2])
end

-- Payloads are keys of the script: their bytes are counted, and their expiry is removed. `others`: keys before the chunks.
local function seen_bytes(payloads, others, chunks)
  if #payloads < others + chunks then return -1 end
  local found = 0
  for i = others + 1, others + chunks do found = found + redis.call('STRLEN', payloads[i]) end
  return found
end

local function pin(payloads, others, chunks)
  for i = others + 1, others + chunks do redis.call('PERSIST', payloads[i]) end
end

-- The newest payload of a group, if that is not the prompt, is garbage now. Return its bytes.
local function free_payload(garbage, gid, held)
  if held.payload == 'init' then return 0 end
  redis.call('SADD', garbage, gid .. ' ' .. held.payload .. ' ' .. held.chunks)
  return num(held.size)
end

-- Whether a payload is one in which the claim with this token kept turns (keep_turns).
local function has_turns_of(token, payload)
  return string.find(payload, token .. '-turns', 1, true) == 1
end
