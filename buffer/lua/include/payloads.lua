-- payloads: seen_bytes and pin, for the payloads that a script accepts.

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
