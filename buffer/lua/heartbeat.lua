#!lua flags=allow-oom
-- heartbeat: a worker lives; renew its leases, take its receipt for a pause, tell it the control state.
-- include: clock, control_state, grace, numbers, receipts
-- KEYS[1] control   HASH*
-- KEYS[2] clock     HASH*
-- KEYS[3] leases    ZSET
-- KEYS[4] workers   ZSET
-- KEYS[5] worker    HASH*    record of the worker
-- KEYS[6] holds     SET      gids that the worker holds
-- KEYS[7] groups    prefix of the group records (HASH)
-- KEYS[8] bell      LIST*    of whoever waits for receipts
-- ARGV[1] worker   name            id
-- ARGV[2] nonce    token           of its registration
-- ARGV[3] lease_ms 1..86_400_000
-- ARGV[4] ack      0..             control epoch that it has carried out
-- ARGV[5] weights  weights         "lineage:version" that its engine acknowledged
-- ARGV[6] state    name            for people: idle, working, paused, draining
-- ARGV[7] rate     number          tokens per second, for people
-- ARGV[8] done     0..             groups finished since it started
-- ARGV[9] concurrency 0..          groups that it would have in work at once; 0 = it does not say
-- ARGV[10] requests ''|0..       that its engine has, running and waiting; '' = the engine does not say
-- ARGV[11] failed  0..             groups that failed in its hands since it started
-- ARGV[12] judged  0..             answers of its judges since it started
-- ARGV[13] judging_ms 0..          how long all of them took together
-- ARGV[14] judge_failures 0..      of these answers, those that were none
-- ARGV[15] judge_p50_ms 0..        half of the newest answers took no longer
-- ARGV[16] judge_p99_ms 0..        99 of 100 did not
-- ARGV[17+] gid, token  bytes..75, bytes..64 x0..1024  pairs that it works on
-- replies OK 6 x control, then the numbers of the pairs that it no longer holds
--       | UNKNOWN (register again) | REPLACED (by another process with this id)
-- keeps I2 (only the owner renews), I10 (an abort or drain receipt means no leases), I13 (repeating it is harmless)
local control, clock, leases, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, holds, groups, bell = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local id, nonce, lease_ms, ack = ARGV[1], ARGV[2], num(ARGV[3]), num(ARGV[4])
local known = redis.call('HGET', worker, 'nonce')
if not known then return {'UNKNOWN'} end
if known ~= nonce then return {'REPLACED'} end

local reply, now, renewed = control_state(control), now_ms(), {}
table.insert(reply, 1, 'OK')
for i = 17, #ARGV - 1, 2 do
  local record = redis.call('HMGET', groups .. ARGV[i], 'token', 'stage')
  if record[1] == ARGV[i + 1] and (record[2] == 'running' or record[2] == 'judging') then
    renewed[#renewed + 1] = int(now + lease_ms)
    renewed[#renewed + 1] = ARGV[i]
  else
    reply[#reply + 1] = (i - 15) / 2
  end
end
tick(clock, now, lease_ms)
if #renewed > 0 then redis.call('ZADD', leases, unpack(renewed)) end
redis.call('ZADD', workers, int(now), id)
redis.call('HSET', worker, 'weights', ARGV[5], 'state', ARGV[6], 'tokens_per_s', ARGV[7], 'done', ARGV[8],
  'concurrency', ARGV[9], 'requests', ARGV[10], 'failed', ARGV[11], 'judged', ARGV[12], 'judging_ms', ARGV[13],
  'judge_failures', ARGV[14], 'judge_p50_ms', ARGV[15], 'judge_p99_ms', ARGV[16], 'seen_ms', int(now))
take_receipt(worker, holds, bell, reply[2], reply[3], ack)
return reply
