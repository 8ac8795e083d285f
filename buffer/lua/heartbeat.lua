#!lua flags=allow-oom
-- heartbeat: renew the lease of a worker, take its receipt for a pause, and return the control state.
-- The lease is renewed where worker and server agree on what it holds; elsewhere the worker calls `reconcile` next.
-- Weights that are too old for the next train step, and so for all later ones, are reported in the reply: the worker
-- stops the groups that have tokens of them, and releases these as `expired`.
-- KEYS control HASH*, clock HASH*, leases ZSET, workers ZSET, worker_record HASH*, leased HASH*, ages prefix
-- KEYS ledger HASH*, lineages LIST*, bell_receipts LIST*, worker_tokens HASH*, accounts prefix
-- ARGV worker         name           id
-- ARGV nonce          token          of its registration
-- ARGV lease_ms       1..86_400_000
-- ARGV ack            0..            control epoch that it has carried out
-- ARGV weights        weights        "lineage:version" that its engine acknowledged
-- ARGV state          name           for people: starting, idle, working, paused, draining
-- ARGV refusal        ''|text..2000  "lineage:version reason" of published weights that it could not load; '' = none
-- ARGV report         ''|text..2048  numbers for people, "name=value name=value": HeartbeatNumbers of buffer/control/worker_record.py
-- ARGV lengths        ''|text..4096  responses that it began, by task, end and length (buffer/control/length_counts.py)
-- ARGV sampled        ''|text..32768 "task=total:closed" tokens of each task: see shared/tokens.lua
-- ARGV held           0..            groups that it holds
-- ARGV digest         0..            sum of the marks of these groups (`mark_of` in shared/workers.lua)
-- ARGV gid, token, lineage, version, threshold  ''|gid, ''|token, name, 0.., 0.. x0..1024  weights of which a held group
--                     has its oldest token, with the stale threshold of the task: once for each held group of which that
--                     was not reported yet, and with empty gid and token once for all others. Groups that do not age, or
--                     have no token, are left out
-- replies OK 9 x control, then the number of each weights that can serve no train step any more
--       | DIFFERS 9 x control, then the same (call `reconcile`)
--       | UNKNOWN (register again) | REPLACED (by another process with this id)
-- keeps I2 (only the registration that holds the groups renews), I8 (what is too old is ended while it runs), I10 (an abort or drain receipt means no leases), I13 (a repeated call is harmless)

local known = redis.call('HMGET', worker_record, 'nonce', 'ack')
if not known[1] then return {'UNKNOWN'} end
if known[1] ~= nonce then return {'REPLACED'} end

local reply, now, aged, step = control_state(control), now_ms(), {}, nil
local count = held_count(leased)
local is_agreed = count == held and num(redis.call('HGET', leased, 'digest')) == digest
table.insert(reply, 1, 'OK')
if not is_agreed then reply[1] = 'DIFFERS' end
for n, gid, token, lineage, version, threshold in each_unit do
  step = step or next_step(ledger)
  local living = living_version(lineages, lineage, int(version))
  if tonumber(living) < step - threshold then reply[#reply + 1] = n end
  if gid ~= '' and redis.call('HGET', leased, gid) == token then
    local age_index = ages .. string.match(gid, '^(.*)%-%d+$')
    if not aged[age_index] then
      -- read first: a wrong type stops the script before it writes
      redis.call('ZCARD', age_index)
      aged[age_index] = {}
    end
    table.insert(aged[age_index], living)
    table.insert(aged[age_index], gid)
  end
end
hear_all(worker_tokens, accounts, sampled)
tick(clock, now, lease_ms)
for age_index, scores in pairs(aged) do redis.call('ZADD', age_index, 'LT', unpack(scores)) end
if is_agreed and count > 0 then redis.call('ZADD', leases, int(now + lease_ms), worker) end
redis.call('ZADD', workers, int(now), worker)
redis.call('HSET', worker_record, 'weights', weights, 'state', state, 'refusal', refusal or '', 'report', report or '', 'lengths', lengths or '',
  'seen_ms', int(now))
take_receipt(worker_record, num(known[2]), count, bell_receipts, reply[2], reply[3], ack)
return reply
