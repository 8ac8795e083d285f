-- steps: next_step, the train step that groups are generated for.
-- include: numbers

-- Return the step that is taken next, or the one whose batch the trainer waits to complete (refill.lua).
local function next_step(ledger)
  local steps = redis.call('HMGET', ledger, 'taken', 'awaits')
  return steps[2] and num(steps[2]) or num(steps[1]) + 1
end
