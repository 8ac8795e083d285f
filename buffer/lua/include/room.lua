-- room: room, how many more groups of a task may be started.
-- include: ages, numbers, steps

-- Return the groups of a task that may still be started: target - consumed - fresh completed - waiting - running, with at
-- most `max_in_flight` of the last two. Of an evaluation, whose target is a draw: target - `drawn`, since each is drawn
-- once. Those of them that can serve no train step any more are not counted: others are started in their stead. Computed
-- in the script that starts them, so that it cannot overshoot.
local function room(progress, jobs, completed, age_index, ledger, target, threshold, max_in_flight, drawn)
  local counts = redis.call('HMGET', progress, 'consumed', 'running')
  local in_flight = num(counts[2])
  for _, stream in ipairs(jobs) do in_flight = in_flight + redis.call('XLEN', stream) end
  local cut, expiring = '-inf', 0
  if threshold then
    cut = int(next_step(ledger) - threshold)
    expiring = expiring_groups(age_index, cut)
  end
  local free = target - (drawn or num(counts[1]) + in_flight - expiring + redis.call('ZCOUNT', completed, cut, '+inf'))
  return max_in_flight and math.min(free, max_in_flight - in_flight) or free
end
