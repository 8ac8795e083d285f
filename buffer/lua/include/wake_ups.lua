-- wake_ups: wake, which sends a wake-up to processes that wait.

local function wake(bell, times)
  local wake_ups = {}
  for n = 1, math.min(times, 64 - redis.call('LLEN', bell)) do wake_ups[n] = '1' end
  if #wake_ups > 0 then redis.call('RPUSH', bell, unpack(wake_ups)) end
end
