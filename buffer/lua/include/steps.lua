-- steps: next_step, the train step that groups are generated for.
-- include: numbers

-- Return the step that is taken next, or the one whose batch the trainer waits to complete (refill.lua).
local function next_step(ledger)
  local steps = redis.call('HMGET', ledger, 'taken', 'awaits')
  local taken, awaits = num(steps[1]), num(steps[2])
  return awaits > 0 and math.min(awaits, taken + 1) or taken + 1
end
