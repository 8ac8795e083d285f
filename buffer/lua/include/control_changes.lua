-- control_changes: settle_mode and publish_hint, which change the control state and announce it (I10).
-- include: clock, control_state, numbers

-- The hint only saves time: a worker that misses it gets the same with its next heartbeat.
local function publish_hint(control)
  redis.call('PUBLISH', control, table.concat(control_state(control), '\0'))
end

-- Trainer and operator have a mode each: the stricter one applies, with the lanes that both leave open (I10).
local function settle_mode(control)
  local all = 'eval resume fresh'
  local strictness = {run = 0, keep = 1, drain = 2, abort = 3, finish = 4}
  local holds = redis.call('HMGET', control, 'operator_mode', 'operator_lanes', 'trainer_mode', 'trainer_lanes')
  local mode = strictness[holds[1]] > strictness[holds[3]] and holds[1] or holds[3]
  local open = {}
  for lane in string.gmatch(holds[2] or all, '%S+') do
    if string.find(' ' .. (holds[4] or all) .. ' ', ' ' .. lane .. ' ', 1, true) then open[#open + 1] = lane end
  end
  redis.call('HSET', control, 'mode', mode, 'lanes', table.concat(open, ' '), 'changed_ms', int(now_ms()))
  local epoch = redis.call('HINCRBY', control, 'epoch', 1)
  publish_hint(control)
  return epoch, mode
end
