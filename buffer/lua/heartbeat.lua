#!lua flags=allow-oom
-- heartbeat: renew the leases of a worker, take its receipt for a pause, and return the control state.
-- A group whose tokens are too old for the next train step, and so for all later ones, is reported in the reply: the
-- worker stops it, and releases it as `expired`.
-- include: clock, control_state, grace, numbers, receipts, staleness
-- KEYS control       HASH*
-- KEYS clock         HASH*
-- KEYS leases        ZSET
-- KEYS workers       ZSET
-- KEYS worker_record HASH*  record of the worker
-- KEYS holds         SET    gids that the worker holds
-- KEYS groups        prefix  of the group records (HASH)
-- KEYS ages          prefix  of the age indexes (ZSET)
-- KEYS ledger        HASH*   of the trainer
-- KEYS lineages      LIST*
-- KEYS bell_receipts LIST*  of processes that wait for receipts
-- ARGV worker         name           id
-- ARGV nonce          token          of its registration
-- ARGV lease_ms       1..86_400_000
-- ARGV ack            0..            control epoch that it has carried out
-- ARGV weights        weights        "lineage:version" that its engine acknowledged
-- ARGV state          name           for people: starting, idle, working, paused, draining
-- ARGV refusal        ''|text..2000  "lineage:version reason" of published weights that it could not load; '' = none
-- ARGV tokens_per_s   number         for people
-- ARGV done           0..            groups finished since it started
-- ARGV concurrency    0..            groups that it runs at a time; 0 = unknown
-- ARGV requests       ''|0..         that its engine has, running and waiting; '' = unknown
-- ARGV failed         0..            groups that failed there since it started
-- ARGV judged         0..            answers of its judges since it started
-- ARGV judging_ms     0..            total time of all of them
-- ARGV judge_failures 0..            those of them without a valid reward
-- ARGV judge_buckets  ''|text..256   number of answers by time: counts by JUDGE_BOUNDS_S of buffer/control/histogram.py
-- ARGV judging        0..            held groups that only wait for their judge
-- ARGV gid, token, lineage, version, threshold  bytes..75, bytes..64, ''|name, ''|0.., ''|0.. x0..1024  of each group that
--                     it holds: the weights of its oldest token, '' = it has none; stale threshold of its task, '' = it
--                     does not age
-- replies OK 6 x control, then a number for each group to stop: n = it no longer holds the n-th one, -n = the n-th one
--                     can serve no train step any more
--       | UNKNOWN (register again) | REPLACED (by another process with this id)
-- keeps I2 (only the owner renews), I8 (what is too old is ended while it runs), I10 (an abort or drain receipt means no leases), I13 (a repeated call is harmless)

local known = redis.call('HGET', worker_record, 'nonce')
if not known then return {'UNKNOWN'} end
if known ~= nonce then return {'REPLACED'} end

local reply, now, renewed, aged, living = control_state(control), now_ms(), {}, {}, {}
local step = num(redis.call('HGET', ledger, 'taken')) + 1
table.insert(reply, 1, 'OK')
for n, gid, token, lineage, version, threshold in each_unit do
  local record = redis.call('HMGET', groups .. gid, 'token', 'stage')
  if record[1] == token and record[2] == 'running' then
    renewed[#renewed + 1] = int(now + lease_ms)
    renewed[#renewed + 1] = gid
    if version and threshold then
      local weights = lineage .. ':' .. int(version)
      living[weights] = living[weights] or living_version(lineages, lineage, int(version))
      local age_index = ages .. string.match(gid, '^(.*)%-%d+$')
      if not aged[age_index] then
        -- read first: a wrong type stops the script before it writes
        redis.call('ZCARD', age_index)
        aged[age_index] = {}
      end
      table.insert(aged[age_index], living[weights])
      table.insert(aged[age_index], gid)
      if tonumber(living[weights]) < step - threshold then reply[#reply + 1] = -n end
    end
  else
    reply[#reply + 1] = n
  end
end
tick(clock, now, lease_ms)
for age_index, scores in pairs(aged) do redis.call('ZADD', age_index, 'LT', unpack(scores)) end
if #renewed > 0 then redis.call('ZADD', leases, unpack(renewed)) end
redis.call('ZADD', workers, int(now), worker)
redis.call('HSET', worker_record, 'weights', weights, 'state', state, 'refusal', refusal or '', 'tokens_per_s', tokens_per_s, 'done', int(done),
  'concurrency', int(concurrency), 'requests', requests and int(requests) or '', 'failed', int(failed),
  'judged', int(judged), 'judging_ms', int(judging_ms), 'judge_failures', int(judge_failures),
  'judge_buckets', judge_buckets, 'judging', int(judging), 'seen_ms', int(now))
take_receipt(worker_record, holds, bell_receipts, reply[2], reply[3], ack)
return reply
