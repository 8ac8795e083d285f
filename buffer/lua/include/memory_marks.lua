-- memory_marks: held_bytes, is_full and is_refused, the bounds on payload bytes (I12).
-- include: numbers

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
