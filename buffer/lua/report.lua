#!lua flags=allow-oom
-- report: keep the newest metrics of training, or of the evaluation of a task, for everybody who watches the run.
-- KEYS control HASH*, report HASH*
-- ARGV nonce token       of the trainer
-- ARGV task  ''|name     of an evaluation; '' = training
-- ARGV entry text..16384 JSON
-- replies OK | FENCED
-- keeps I7, I13 (absolute)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
redis.call('HSET', report, task == '' and 'train' or 'eval:' .. task, entry)
return {'OK'}
