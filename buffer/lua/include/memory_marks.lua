-- memory_marks: held_bytes, is_full and is_refused, the bounds on payload bytes (I12).
-- include: numbers

local function held_bytes(bytes)
  local counts = redis.call('HMGET', bytes, 'came', 'went')
  return num(counts[1]) - num(counts[2])
end

-- Whether so much is held as the mark says; 0 = there is no mark.
local function is_full(bytes, mark) return mark > 0 and held_bytes(bytes) >= mark end

-- Whether nothing may be started for want of memory. Where nobody runs, and no batch is there that a checkpoint would
-- free, waiting would be for ever: then a little is started all the same.
local function is_refused(bytes, mark, leases, training)
  if not is_full(bytes, mark) then return false end
  local steps = redis.call('HMGET', training, 'taken', 'freed')
  return redis.call('ZCARD', leases) > 0 or num(steps[1]) > num(steps[2])
end
