#!lua flags=allow-oom
-- reset_ledger: set the trainer's ledger to step F, up to which everything is archived or drawn again.
-- KEYS control HASH, ledger HASH, accounts prefix, events STREAM
-- ARGV nonce     token  of the trainer
-- ARGV step      0..    F
-- ARGV committed 0..    step of the trainer's checkpoint
-- ARGV task, consumed  name, 0.. x0..256  groups of the task in batches up to F
-- replies OK taken | FENCED | LIVE taken (a batch is still to be archived or dissolved)
-- keeps I6 (nothing below F is delivered again), I7, I13 (absolute)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'freed', 'forgotten', 'exported')
local taken, freed = num(steps[1]), num(steps[2])
if taken ~= freed then return {'LIVE', int(taken)} end
for _, task in each_unit do redis.call('HLEN', accounts .. task) end

redis.call('HSET', ledger, 'taken', int(step), 'freed', int(step), 'keep', int(step), 'committed', int(committed),
  'slice', 0, 'forgotten', int(math.min(step, num(steps[3]))), 'exported', int(math.min(step, num(steps[4]))))
for _, task, consumed in each_unit do redis.call('HSET', accounts .. task, 'consumed', int(consumed)) end
if taken ~= step then log_event(events, 'ledger_reset', 'from', int(taken), 'step', int(step)) end
return {'OK', int(step)}
