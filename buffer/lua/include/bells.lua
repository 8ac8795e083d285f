-- bells: ring, which sends a wake-up to processes that wait.

local function ring(bell, times)
  local wake_ups = {'1'}
  for n = 2, math.min(times, 64) do wake_ups[n] = '1' end
  if redis.call('RPUSH', bell, unpack(wake_ups)) > 64 then redis.call('LTRIM', bell, -64, -1) end
end
