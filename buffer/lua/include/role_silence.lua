-- role_silence: silence_ms, how long the holder of a role has been silent.
-- include: numbers

-- Return the time since the last heartbeat of a holder. If that lies in the future, the clock was set back: the absolute
-- value is used, since a live holder has sent a heartbeat since then.
local function silence_ms(now, seen) return math.abs(now - num(seen)) end
