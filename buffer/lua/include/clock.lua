-- clock: now_ms, the time of the server.
-- include: numbers

local function now_ms()
  local time = redis.call('TIME')
  return num(time[1]) * 1000 + math.floor(num(time[2]) / 1000)
end
