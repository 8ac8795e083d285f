-- byte_count: count_bytes, which keeps the count of payload bytes (I12).
-- include: numbers

-- Payload bytes of all groups, as cumulative counters: held bytes are `came` less `went`.
local function count_bytes(bytes, came, went)
  if came > 0 then redis.call('HINCRBY', bytes, 'came', int(came)) end
  if went > 0 then redis.call('HINCRBY', bytes, 'went', int(went)) end
end
