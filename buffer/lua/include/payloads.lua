-- payloads: seen_bytes and pin, for the payloads that a script accepts; has_turns_of.

-- Payloads in the run's slot are keys of the script: their bytes are counted and their expiry is removed here. In a
-- cluster they lie in other slots: no key is given, the caller's size is believed, and they are listed for the caller,
-- who removes their expiry (buffer/redis/payloads.py). `others`: number of keys before the chunks.
local function seen_bytes(payloads, others, chunks, size)
  if #payloads == 0 then return size end
  if #payloads < others + chunks then return -1 end
  local found = 0
  for i = others + 1, others + chunks do found = found + redis.call('STRLEN', payloads[i]) end
  return found
end

local function pin(payloads, others, chunks, unpinned, entry)
  if #payloads == 0 then redis.call('SADD', unpinned, entry) return end
  for i = others + 1, others + chunks do redis.call('PERSIST', payloads[i]) end
end

-- Whether a payload is one in which the claim with this token kept turns (keep_turns).
local function has_turns_of(token, payload)
  return string.find(payload, token .. '-turns', 1, true) == 1
end
