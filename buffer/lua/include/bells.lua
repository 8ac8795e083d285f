-- bells: ring, which sends a wake-up to processes that wait.

local function ring(bell, times)
  local rung = 0
  for _ = 1, math.min(times, 64) do rung = redis.call('RPUSH', bell, '1') end
  if rung > 64 then redis.call('LTRIM', bell, -64, -1) end
end
