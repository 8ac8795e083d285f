-- clock: the time of the server, and for how long somebody has been silent.

local function now_ms()
  local time = redis.call('TIME')
  return num(time[1]) * 1000 + math.floor(num(time[2]) / 1000)
end

-- I11: if the server's clock moved by more than half a lease since the last script, or backwards, every holder
-- gets one whole lease to send a heartbeat before anything is reaped. Return the end of that period.
local function tick(clock, now, lease_ms)
  local seen = redis.call('HMGET', clock, 'seen_ms', 'grace_until_ms')
  local last, grace = tonumber(seen[1] or now), num(seen[2])
  if now < last or now - last > lease_ms / 2 then grace = now + lease_ms end
  if grace > now + lease_ms then grace = now + lease_ms end
  -- written once for the many scripts of a moment
  if seen[1] and now >= last and now - last < lease_ms / 100 and grace == num(seen[2]) then return grace end
  redis.call('HSET', clock, 'seen_ms', int(now), 'grace_until_ms', int(grace))
  return grace
end

-- Return the time since the last heartbeat of a holder. If that lies in the future, the clock was set back: the absolute
-- value is used, since a live holder has sent a heartbeat since then.
local function silence_ms(now, seen) return math.abs(now - num(seen)) end

-- The answer to a process that wants a role while another one holds it, and is alive; nil if it may have the role.
local function refuse_role(control, role, nonce, timeout_ms, take_over)
  local holder, seen_ms = unpack(redis.call('HMGET', control, role, role .. '_seen_ms'))
  local silent_ms = silence_ms(now_ms(), seen_ms)
  local is_held = (holder or '') ~= '' and holder ~= nonce and silent_ms < timeout_ms
  if is_held and not take_over then return {'HELD', int(silent_ms)} end
end
