#!lua flags=allow-oom
-- trainer_open: become the trainer of a run, from a checkpoint of step S (0 = from the start).
-- Batches S+1… that were taken stay as they are and are delivered again; a new lineage of weights starts at S. Take is
-- refused until lost state is asserted again and the pools are clamped.
-- KEYS meta HASH, control HASH, ledger HASH, lineages LIST, events STREAM
-- ARGV run_nonce  ''|token       of the checkpoint, or what this run continues; '' = there is none
-- ARGV nonce      token          of this trainer
-- ARGV take_over  0|1            1 = even if another one still sends heartbeats
-- ARGV timeout_ms 0..86_400_000  silence after which a holder counts as dead
-- ARGV step       0..            S
-- ARGV lineage    name           of the weights that this trainer will publish
-- ARGV behind     0|1            1 = even if the server lost steps: this trainer asserts them again
-- ARGV regenerate 0|1            1 = even if the run is new here, or S is below what is kept: draws are drawn again
-- replies OK run_nonce taken committed freed | LOST nonce | EMPTY nonce | HELD silent_ms | BELOW keep | BEHIND taken
-- keeps I6 (a run without a trainer is not the one of a checkpoint; opening below what is kept is refused),
-- I7 (one trainer), I13 (natural key: the nonce)

local actual = redis.call('HGET', meta, 'nonce') or ''
local again = redis.call('HGET', control, 'trainer') == nonce
local is_new = redis.call('LLEN', lineages) == 0
local continues = redis.call('HGET', meta, 'continues')
regenerate = regenerate or (is_new and continues)
local is_other = run_nonce ~= '' and run_nonce ~= actual and run_nonce ~= continues
if actual == '' or (is_other and not (is_new and regenerate)) then return {'LOST', actual} end
if is_new and step > 0 and not regenerate then return {'EMPTY', actual} end
local refused = refuse_role(control, 'trainer', nonce, timeout_ms, take_over)
if refused then return refused end
local steps = redis.call('HMGET', ledger, 'taken', 'committed', 'freed', 'keep')
local taken, freed = num(steps[1]), num(steps[3])
local keep = math.max(freed, num(steps[4]))
if not again and step < keep and not regenerate then return {'BELOW', int(keep)} end
if not again and taken < step and not behind then return {'BEHIND', int(taken)} end

redis.call('HSET', control, 'trainer', nonce, 'trainer_seen_ms', int(now_ms()))
if not again then
  -- what the trainer before announced is never published
  redis.call('HDEL', control, 'next_weights', 'next_weights_path', 'next_weights_checksum', 'trainer_change')
  redis.call('HSET', ledger, 'committed', int(step))
  redis.call('HDEL', ledger, 'awaits')  -- the trainer before waits for no groups any more
  redis.call('RPUSH', lineages, lineage .. ':' .. int(step))
  -- take is refused until rescore has clamped groups of dead lineages after S (I8), or after the S of a trainer that died
  -- before that: its lineage counts, too
  local undone = redis.call('HGET', control, 'recovering')
  redis.call('HSET', control, 'recovering', int(math.min(step, tonumber(undone or step))))
  log_event(events, 'trainer_opened', 'nonce', nonce, 'step', int(step), 'lineage', lineage)
end
return {'OK', actual, int(taken), redis.call('HGET', ledger, 'committed'), int(freed)}
