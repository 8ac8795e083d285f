-- dead_letter: to_dead_letter, which keeps a group with the reason of its death; letter_of, that as JSON (I11).
-- include: clock, numbers

-- The JSON of a letter. `reason`: a JSON string; `step`: of the batch from which the group was quarantined, or nil.
local function letter_of(reason, worker, step)
  return '{"reason":' .. reason .. ',"worker":"' .. worker .. '"' .. (step and ',"step":' .. int(step) or '') .. '}'
end

local function to_dead_letter(keys, gid, letter)
  redis.call('HSET', keys.groups .. gid, 'stage', 'dead', 'status', 'failed', 'token', '')
  redis.call('ZADD', keys.dead, int(now_ms()), gid)
  redis.call('SET', keys.dead_letters .. gid, letter)
  redis.call('HINCRBY', keys.progress, 'dead', 1)
end
