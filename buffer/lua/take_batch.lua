#!lua flags=allow-oom
-- take_batch: give the next batch of groups to the trainer, for all tasks at once, in the order of the run.
-- KEYS control HASH*, ledger HASH*, batch LIST*, groups prefix, bell_producer LIST*, events STREAM*
-- KEYS lineages LIST*, ledger_train HASH*, bytes HASH*
-- KEYS completed, progress, age_index  ZSET*, HASH, ZSET* x0..256  of each task
-- ARGV nonce     token   of the trainer
-- ARGV step      0..     T
-- ARGV strict    0|1     1 = everything that is requested, or nothing
-- ARGV order     staleness|fifo  see next_in_order
-- ARGV tokens    ''|1..  staleness from which a single token is not trained; '' = no limit
-- ARGV low       0..     payload bytes of the run from which no new prompt is started; 0 = no bound
-- ARGV high      0..     the same for all groups
-- ARGV task, count, threshold, waits  name, 1..1_000_000, ''|0.., 0|1 xKEYS  of each; its stale threshold in steps, '' = nothing is
--                too old; whether the step waits for groups that run and could serve no later one
-- replies OK header, then "gid token chunks size crc samples version" per group
--       | SHORT (task ready wanted)… | STRAGGLERS (task ready wanted)… | EMPTY | CHECKPOINT_NOW (task ready wanted)… | FENCED | RECOVERING | COMMITTED committed | GAP taken | TOO_MANY limit
--       | DAMAGED record (it is gone, and its group is in the pool: nothing was done)
-- keeps I4 (all tasks or none), I5 (a step taken is returned as it was), I7, I8 (cut here), I12 (take does not wait for
-- memory that only a checkpoint frees), I13 (step)

local holder, is_recovering = unpack(redis.call('HMGET', control, 'trainer', 'recovering'))
if holder ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'committed', 'keep')
-- archived batches are never delivered again: their manifests are only kept for inspection
if step <= num(steps[3]) then return {'COMMITTED', int(num(steps[2]))} end
if is_recovering then return {'RECOVERING'} end
if redis.call('EXISTS', batch) == 1 then return {'OK', unpack(redis.call('LRANGE', batch, 0, -1))} end
if step <= num(steps[2]) then return {'COMMITTED', int(num(steps[2]))} end
if step ~= num(steps[1]) + 1 then return {'GAP', int(num(steps[1]))} end

local pools, cuts, asked, counts, wanted, ready_in_all, running, stragglers = {}, {}, {}, {}, 0, 0, 0, 0
local is_short = false
for n, completed, progress, age_index, task, count, threshold, waits in each_unit do
  local cut = threshold and int(step - threshold) or '-inf'
  local ready, at_work = redis.call('ZCOUNT', completed, cut, '+inf'), num(redis.call('HGET', progress, 'running'))
  pools[n] = {completed = completed, progress = progress, cut = cut, count = count}
  cuts[n], asked[n] = task .. '=' .. cut, task .. '=' .. int(count)
  for _, fact in ipairs({task, ready, int(count)}) do counts[#counts + 1] = fact end
  wanted, ready_in_all, running = wanted + count, ready_in_all + math.min(ready, count), running + at_work
  is_short = is_short or ready < count
  -- a dead worker's groups run only until its lease ends, and waiting ones without a worker hold nobody up
  if waits and threshold and at_work > 0 then stragglers = stragglers + redis.call('ZCOUNT', age_index, cut, cut) end
end
local function refused(code) return {code, unpack(counts)} end

if wanted > 1024 then return {'TOO_MANY', 1024} end
-- a batch before it that lacks groups stays so: what only that one could use counts no more as ready
if redis.call('HDEL', ledger, 'awaits') == 1 then wake(bell_producer, 1) end
if (is_short and strict) or ready_in_all == 0 then
  local held = redis.call('HMGET', ledger_train, 'taken', 'freed')
  local is_stuck = is_full(bytes, high) or (is_full(bytes, low) and running == 0)
  if is_stuck and num(held[1]) > num(held[2]) then return refused('CHECKPOINT_NOW') end
end
if is_short and strict then return refused('SHORT') end
if stragglers > 0 and strict then return refused('STRAGGLERS') end
if ready_in_all == 0 then return {'EMPTY'} end

local header = 'step=' .. int(step) .. ' cut=' .. table.concat(cuts, ',') .. ' asked=' .. table.concat(asked, ',') ..
  ' strict=' .. (strict and '1' or '0') .. ' order=' .. order .. ' taken_ms=' .. int(now_ms())
-- which tokens are masked is a function of this record alone, so that every delivery is the same (I5)
if tokens then
  header = header .. ' tokens=' .. int(tokens) .. ' forks=' .. table.concat(redis.call('LRANGE', lineages, -64, -1), ',')
end
local name, lines, taken = string.match(batch, ':batch:(.*)$'), {header}, {}
for _, pool in ipairs(pools) do
  pool.chosen = next_in_order(order, pool.completed, pool.cut, pool.count)
  for _, member in ipairs(pool.chosen) do
    local gid = gid_of(member)
    local line = manifest_line(groups, gid)
    if not line then return {'DAMAGED', groups .. gid} end
    lines[#lines + 1], taken[#taken + 1] = line, groups .. gid
  end
end
-- first: a caller that may not write them (ACL) is stopped before a group has moved
redis.call('RPUSH', batch, unpack(lines))
redis.call('HSET', ledger, 'taken', int(step))
for _, record in ipairs(taken) do redis.call('HSET', record, 'stage', 'taken', 'batch', name) end
for _, pool in ipairs(pools) do
  if #pool.chosen > 0 then
    redis.call('ZREM', pool.completed, unpack(pool.chosen))
    for _, counter in ipairs({'taken', 'consumed'}) do redis.call('HINCRBY', pool.progress, counter, #pool.chosen) end
  end
end
wake(bell_producer, 1)
log_event(events, 'taken', 'step', int(step), 'groups', int(ready_in_all))
return {'OK', unpack(lines)}
