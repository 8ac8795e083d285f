-- role_silence: silence_ms, how long the holder of a role has been silent.
-- include: numbers

-- Since a holder of a role was seen. If that lies ahead of now, it is as long ago: the clock was stepped back, and
-- whoever lives has beaten since.
local function silence_ms(now, seen) return math.abs(now - num(seen)) end
