#!lua flags=allow-oom
-- register: register a worker, or register it again after the server forgot it.
-- KEYS meta HASH, control HASH, workers ZSET, worker_record HASH, events STREAM, worker_tokens HASH, accounts prefix
-- ARGV worker name   id
-- ARGV nonce  token  of this registration
-- ARGV sampled ''|0..  tokens that this process has sampled so far
-- ARGV field, value  name, text..1024 x0..64  engine, host, pid, concurrency…, for people
-- replies OK run_nonce 9 x control | NO_RUN
-- keeps I10 (a worker that registers during a pause starts paused), I13 (nonce)

local run_nonce = redis.call('HGET', meta, 'nonce')
if not run_nonce then return {'NO_RUN'} end
local now = int(now_ms())
if redis.call('HGET', worker_record, 'nonce') ~= nonce then
  if redis.call('HGET', worker_tokens, 'nonce') ~= nonce then
    settle_tokens(worker_tokens, accounts)
    redis.call('UNLINK', worker_tokens)
    if (sampled or 0) == 0 then redis.call('HSET', worker_tokens, 'nonce', nonce) end
  end
  redis.call('PERSIST', worker_tokens)
  redis.call('UNLINK', worker_record)
  redis.call('HSET', worker_record, 'nonce', nonce, 'state', 'starting', 'ack', 0, 'joined_ms', now, 'seen_ms', now)
  for _, field, value in each_unit do redis.call('HSET', worker_record, field, value) end
  log_event(events, 'worker_joined', 'worker', worker)
end
redis.call('ZADD', workers, now, worker)
return {'OK', run_nonce, unpack(control_state(control))}
