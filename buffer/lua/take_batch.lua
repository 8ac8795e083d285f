#!lua flags=allow-oom
-- take_batch: hand the next batch of groups to the trainer, for all tasks at once, in the order of the run's policy.
-- KEYS[1] control   HASH
-- KEYS[2] ledger    HASH
-- KEYS[3] batch     LIST     the manifest of this step
-- KEYS[4] groups    prefix of the group records (HASH)
-- KEYS[5] bell      LIST     of the producer
-- KEYS[6] events    STREAM
-- KEYS[7+] pool, order, progress  (ZSET, ZSET, HASH) of each task
-- ARGV[1] nonce     of the trainer
-- ARGV[2] step      T
-- ARGV[3] strict    1 = all that is asked for, or nothing
-- ARGV[4] threshold stale threshold in steps; '' = nothing is too old
-- ARGV[5] policy    order policy of the run
-- ARGV[6+] task, count  for each pair: 6 and 7 for the first
-- replies OK header, then "gid token chunks size crc samples version" per group
--       | SHORT (task ready wanted)… | EMPTY | FENCED | RECOVERING | COMMITTED committed | GAP taken | TOO_MANY limit
--       | BLOCKED task | UNORDERED task (nothing was done; see buffer/order_index.py)
-- keeps I4 (all tasks or none), I5 (a step taken is returned as it was), I7, I8 (cut here), I13 (step)
local control, ledger, batch, groups, bell, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local nonce, step, strict, threshold, policy = ARGV[1], num(ARGV[2]), ARGV[3] == '1', ARGV[4], ARGV[5]

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'committed', 'keep')
-- what is archived, or about to be, is never delivered again: its manifest is only kept for those who look back
if step <= num(steps[3]) then return {'COMMITTED', int(num(steps[2]))} end
if redis.call('EXISTS', batch) == 1 then return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))} end
if redis.call('HGET', control, 'recovering') then return {'RECOVERING'} end
if step <= num(steps[2]) then return {'COMMITTED', int(num(steps[2]))} end
if step ~= num(steps[1]) + 1 then return {'GAP', int(num(steps[1]))} end

local cut = threshold == '' and '-inf' or int(step - tonumber(threshold))
local asked, short, wanted, ready_in_all, is_short = {}, {'SHORT'}, 0, 0, false
for i = 7, #KEYS, 3 do
  local pair = 6 + (i - 7) / 3 * 2
  local task, count = ARGV[pair], num(ARGV[pair + 1])
  local ready = redis.call('ZCOUNT', KEYS[i], cut, '+inf')
  wanted = wanted + count
  ready_in_all = ready_in_all + math.min(ready, count)
  is_short = is_short or ready < count
  asked[#asked + 1] = task .. '=' .. int(count)
  for _, value in ipairs({task, ready, int(count)}) do short[#short + 1] = value end
end
if wanted > 4096 then return {'TOO_MANY', 4096} end
if is_short and strict then return short end
if ready_in_all == 0 then return {'EMPTY'} end
local chosen = {}
for i = 7, #KEYS, 3 do
  local pair = 6 + (i - 7) / 3 * 2
  local members, problem = next_ready(policy, KEYS[i], KEYS[i + 1], KEYS[i + 2], cut, num(ARGV[pair + 1]))
  if problem == 'blocked' then return {'BLOCKED', ARGV[pair]} end
  if problem == 'unordered' then return {'UNORDERED', ARGV[pair]} end
  chosen[i] = members
end

local header = 'step=' .. int(step) .. ' cut=' .. cut .. ' asked=' .. table.concat(asked, ',') ..
  ' strict=' .. (strict and '1' or '0') .. ' order=' .. policy .. ' taken_ms=' .. int(now_ms())
redis.call('RPUSH', batch, header)
local name = string.match(batch, ':batch:(.*)$')
for i = 7, #KEYS, 3 do
  for _, member in ipairs(chosen[i]) do
    local gid = string.match(member, ':(.*)$')
    redis.call('RPUSH', batch, manifest_line(groups, gid))
    redis.call('HSET', groups .. gid, 'stage', 'taken', 'batch', name)
  end
  take_out(KEYS[i], KEYS[i + 1], KEYS[i + 2], chosen[i])
  redis.call('HINCRBY', KEYS[i + 2], 'consumed', #chosen[i])
  redis.call('HINCRBY', KEYS[i + 2], 'taken', #chosen[i])
end
redis.call('HSET', ledger, 'taken', int(step))
ring(bell, 1)
log_event(events, 'taken', 'step', int(step), 'groups', int(ready_in_all))
return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))}
