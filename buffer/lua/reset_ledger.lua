#!lua flags=allow-oom
-- reset_ledger: put the ledger of the trainer at step F, up to which everything is archived or drawn again.
-- include: events, numbers
-- KEYS[1] control   HASH
-- KEYS[2] ledger    HASH
-- KEYS[3] progress  prefix of the tasks' accounts (HASH)
-- KEYS[4] events    STREAM
-- ARGV[1] nonce     token  of the trainer
-- ARGV[2] step      0..    F
-- ARGV[3] committed 0..    step of the trainer's checkpoint
-- ARGV[4+] task, consumed  name, 0.. x0..256  groups of the task in batches up to F
-- replies OK taken | FENCED | LIVE taken (a batch is still to be archived or dissolved)
-- keeps I6 (nothing below F is delivered again), I7, I13 (absolute)
local control, ledger, progress, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local nonce, step, committed = ARGV[1], num(ARGV[2]), num(ARGV[3])

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'freed', 'forgotten', 'exported')
local taken, freed = num(steps[1]), num(steps[2])
if taken ~= freed then return {'LIVE', int(taken)} end
for i = 4, #ARGV - 1, 2 do redis.call('HLEN', progress .. ARGV[i]) end

redis.call('HSET', ledger, 'taken', int(step), 'freed', int(step), 'keep', int(step), 'committed', int(committed),
  'slice', 0, 'forgotten', int(math.min(step, num(steps[3]))), 'exported', int(math.min(step, num(steps[4]))))
for i = 4, #ARGV - 1, 2 do redis.call('HSET', progress .. ARGV[i], 'consumed', ARGV[i + 1]) end
if taken ~= step then log_event(events, 'ledger_reset', 'from', int(taken), 'step', int(step)) end
return {'OK', int(step)}
