-- payloads: seen_bytes and pin, for the payloads that a script accepts.

-- Payloads in the run's slot are keys from `first` on, and are seen and pinned here. In a cluster they lie elsewhere:
-- none is given, the caller is believed, and they are listed for it to pin (buffer/pins.py). `others` of the keys from
-- `first` on stand before the chunks.
local function seen_bytes(keys, first, others, chunks, said)
  if #keys < first then return said end
  local found = 0
  for i = first + others, #keys do found = found + redis.call('STRLEN', keys[i]) end
  return #keys == first - 1 + others + chunks and found or -1
end

local function pin(keys, first, unpinned, entry)
  if #keys < first then redis.call('SADD', unpinned, entry) end
  for i = first, #keys do redis.call('PERSIST', keys[i]) end
end
