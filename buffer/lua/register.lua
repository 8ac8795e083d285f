#!lua flags=allow-oom
-- register: a worker joins, or joins again after the server forgot it.
-- include: clock, control_state, events, numbers
-- KEYS[1] meta      HASH
-- KEYS[2] control   HASH
-- KEYS[3] workers   ZSET
-- KEYS[4] worker    HASH     record of the worker
-- KEYS[5] events    STREAM
-- ARGV[1] worker name   id
-- ARGV[2] nonce  token  of this registration
-- ARGV[3+] field, value name, text..1024 x0..64  engine, host, pid, concurrency…, for people
-- replies OK run_nonce 6 x control | NO_RUN
-- keeps I10 (a worker that joins during a pause learns of it here), I13 (nonce)
local meta, control, workers, worker, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local run_nonce = redis.call('HGET', meta, 'nonce')
if not run_nonce then return {'NO_RUN'} end
local now = int(now_ms())
if redis.call('HGET', worker, 'nonce') ~= ARGV[2] then
  redis.call('UNLINK', worker)
  redis.call('HSET', worker, 'nonce', ARGV[2], 'state', 'starting', 'ack', 0, 'joined_ms', now, 'seen_ms', now)
  for i = 3, #ARGV - 1, 2 do redis.call('HSET', worker, ARGV[i], ARGV[i + 1]) end
  log_event(events, 'worker_joined', 'worker', ARGV[1])
end
redis.call('ZADD', workers, now, ARGV[1])
return {'OK', run_nonce, unpack(control_state(control))}
