#!lua flags=allow-oom
-- trainer_open: become the one trainer of a run, from a checkpoint of step S (0 = from the start).
-- Batches S+1… that were taken stay as they are and are delivered again; a new lineage of weights starts at S.
-- KEYS[1] meta      HASH
-- KEYS[2] control   HASH
-- KEYS[3] ledger    HASH
-- KEYS[4] lineages  LIST
-- KEYS[5] events    STREAM
-- ARGV[1] run_nonce  that the checkpoint knows; '' = it knows none
-- ARGV[2] nonce      of this trainer
-- ARGV[3] take_over  1 = although another one still beats
-- ARGV[4] timeout_ms silence after which a holder counts as gone
-- ARGV[5] step       S
-- ARGV[6] lineage    of the weights this trainer will make
-- replies OK run_nonce taken committed freed | LOST nonce | HELD silent_ms | BELOW keep | BEHIND taken
-- keeps I6 (reopening below what is kept is refused), I7 (one trainer), I13 (natural key: the nonce)
local meta, control, ledger, lineages, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local run_nonce, nonce, take_over, timeout_ms = ARGV[1], ARGV[2], ARGV[3], num(ARGV[4])
local step, lineage = num(ARGV[5]), ARGV[6]

local actual = redis.call('HGET', meta, 'nonce') or ''
if actual == '' or (run_nonce ~= '' and run_nonce ~= actual) then return {'LOST', actual} end

local holder = redis.call('HMGET', control, 'trainer', 'trainer_seen_ms')
local now = now_ms()
local silent_ms = now - num(holder[2])
local again = holder[1] == nonce
if (holder[1] or '') ~= '' and not again and silent_ms < timeout_ms and take_over ~= '1' then
  return {'HELD', int(silent_ms)}
end
local steps = redis.call('HMGET', ledger, 'taken', 'committed', 'freed', 'keep')
local taken, freed = num(steps[1]), num(steps[3])
local keep = math.max(freed, num(steps[4]))
if not again and step < keep then return {'BELOW', int(keep)} end
if not again and taken < step then return {'BEHIND', int(taken)} end

redis.call('HSET', control, 'trainer', nonce, 'trainer_seen_ms', int(now))
if not again then
  redis.call('HSET', ledger, 'committed', int(step))
  redis.call('RPUSH', lineages, lineage .. ':' .. int(step))
  -- take waits until rescore has clamped what dead lineages made after S (I8)
  redis.call('HSET', control, 'recovering', 1)
  log_event(events, 'trainer_opened', 'nonce', nonce, 'step', int(step), 'lineage', lineage)
end
return {'OK', actual, int(taken), redis.call('HGET', ledger, 'committed'), int(freed)}
