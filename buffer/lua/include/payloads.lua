-- payloads: seen_bytes and pin, for the payloads that a script accepts; has_turns_of.

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

-- Whether a payload is one in which the claim with this token kept turns (keep_turns).
local function has_turns_of(token, payload)
  return string.find(payload, token .. '-turns', 1, true) == 1
end
