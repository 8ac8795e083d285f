#!lua flags=allow-oom
-- deregister: remove a worker that has given everything back.
-- KEYS workers ZSET, worker_record HASH, leased HASH, events STREAM, worker_tokens HASH, accounts prefix
-- ARGV worker name   id
-- ARGV nonce  token  of its registration
-- ARGV sampled  ''|text..32768  as in heartbeat
-- replies OK | HOLDS groups (its lease has to run out) | UNKNOWN (its registration had ended)
-- keeps I1 (tokens), I2, I13 (a repeated call is harmless)

local is_known = redis.call('HGET', worker_record, 'nonce') == nonce
-- the totals of a process count although it was fenced, or given up, before it said them
if not is_known and redis.call('HGET', worker_tokens, 'nonce') ~= nonce then return {'UNKNOWN'} end
local held = held_count(leased)
hear_all(worker_tokens, accounts, sampled)
if is_known and held > 0 then return {'HOLDS', held} end
settle_tokens(worker_tokens, accounts)
if not is_known then return {'UNKNOWN'} end
forget_worker(events, 'worker_left', workers, worker, worker_record)
return {'OK'}
