-- ends: how groups end, and tasks of which every try fails.

local ENDS = {'archived', 'filtered', 'dropped', 'skipped'}

-- Return one of these; nil if the draw has not ended. `bitmaps`: what the keys of its task begin with.
local function ended_stage(bitmaps, draw)
  for _, place in ipairs(ENDS) do
    if redis.call('GETBIT', bitmaps .. place, draw) == 1 then return place end
  end
end

-- The answer to a call for a group without a record. `ends`: the prefix of the bitmaps of all tasks.
local function answer_without_record(ends, gid)
  local task, draw = string.match(gid, '^(.*)%-(%d+)$')
  local stage = ended_stage(ends .. task .. ':', tonumber(draw))
  return stage and {'ENDED', stage} or {'UNKNOWN'}
end

-- End a group that has left its stage: its bytes are garbage, and its record is gone. Its bit is still to be set.
local function end_group(groups, garbage, bytes, gid, held)
  redis.call('SADD', garbage, gid .. ' init 1')
  count_bytes(bytes, 0, num(held.prompt) + free_payload(garbage, gid, held))
  redis.call('UNLINK', groups .. gid)
end

-- The JSON of a letter. `reason`: a JSON string; `step`: of the batch from which the group was quarantined, or nil.
local function letter_of(reason, worker, step)
  return '{"reason":' .. reason .. ',"worker":"' .. worker .. '"' .. (step and ',"step":' .. int(step) or '') .. '}'
end

local function to_dead_letter(keys, gid, letter)
  end_tokens(keys.progress, 'dead', keys.groups .. gid)
  redis.call('HSET', keys.groups .. gid, 'stage', 'dead', 'status', 'failed', 'token', '')
  redis.call('ZADD', keys.dead, int(now_ms()), gid)
  redis.call('SET', keys.dead_letters .. gid, letter)
  redis.call('HINCRBY', keys.progress, 'dead', 1)
end

-- The fields that `expire_groups` needs of a record.
local EXPIRING = {'payload', 'chunks', 'size', 'prompt', 'draw', 'newest', 'made'}

-- Put groups that can serve no train step any more into the pool of expired groups, or drop them. They have no job, lease
-- or place in a pool any more; one that was in a pool has its `arrival` still. A group keeps its bytes if some members are
-- not older than `cut`: the worker that claims it reads which (I14). Return their stage.
local function expire_groups(keys, groups, retryable, cut)
  local freed, scored, ended, went, tokens = {}, {}, {}, 0, 0
  for _, one in ipairs(groups) do
    local gid, record = one.gid, keys.groups .. one.gid
    local payload, chunks, size, prompt, draw, newest, made = unpack(one.held)
    local keeps_bytes = payload == 'init' or (retryable and newest and num(newest) >= cut)
    if not keeps_bytes then
      freed[#freed + 1] = gid .. ' ' .. payload .. ' ' .. chunks
      went = went + num(size)
    end
    if not (keeps_bytes and retryable) then tokens = tokens + num(made) end
    if retryable then
      local fields = {'status', 'expired', 'version', '', 'lineage', '', 'cut', int(cut)}
      if not keeps_bytes then
        fields = {'payload', 'init', 'chunks', 1, 'size', num(prompt), 'crc', '', 'tokens', 0, 'made', 0,
          unpack(fields)}
      end
      if not one.arrival then
        one.arrival = next_arrival(keys.progress)
        redis.call('HDEL', record, 'lane', 'entry', 'claimed_ms')
        redis.call('HSET', record, 'stage', 'pool', 'token', '', 'owner', '', 'arrival', one.arrival)
      end
      redis.call('HSET', record, unpack(fields))
      scored[#scored + 1], scored[#scored + 2] = '+inf', one.arrival .. ':' .. gid
    else
      freed[#freed + 1], ended[#ended + 1] = gid .. ' init 1', record
      went = went + num(prompt)
      redis.call('SETBIT', keys.dropped, draw, 1)
    end
  end
  if retryable then
    redis.call('ZADD', keys.expired, unpack(scored))
  else
    redis.call('UNLINK', unpack(ended))
    redis.call('HINCRBY', keys.progress, 'dropped', #groups)
  end
  if #freed > 0 then redis.call('SADD', keys.garbage, unpack(freed)) end
  count_bytes(keys.bytes, 0, went)
  add_tokens(keys.progress, retryable and 'expired' or 'dropped', tokens)
  redis.call('HINCRBY', keys.progress, 'expirations', #groups)
  return retryable and 'pool' or 'dropped'
end

-- Start no more groups of a task until `resume_task`: enqueue, reissue and claim refuse it from now on.
local function stop_task(progress, task, reason, bell_trainer, events)
  if redis.call('HSETNX', progress, 'stopped', reason) == 0 then return end
  wake(bell_trainer, 1)
  log_event(events, 'stopped', 'task', task, 'reason', string.sub(reason, 1, 100))
end

-- End a draw whose prompt makes no sense, and whose record is gone: set its bit, and keep its letter among the newest
-- 10,000 of the task. Stop the task if more than `most` of its newest 64 groups were skipped: a letter begins with the
-- number of groups that had ended, so that of the oldest of most + 1 letters tells.
local function skip_draw(keys, task, draw, letter, most)
  redis.call('SETBIT', keys.skipped, draw, 1)
  redis.call('HINCRBY', keys.progress, 'skipped', 1)
  local counts = redis.call('HMGET', keys.progress, 'produced_groups', 'skipped', 'skips_from')
  local ended = num(counts[1]) + num(counts[2])
  redis.call('LPUSH', keys.skips, int(ended) .. ' ' .. int(now_ms()) .. ' ' .. letter)
  redis.call('LTRIM', keys.skips, 0, 9999)
  local oldest = tonumber(string.match(redis.call('LINDEX', keys.skips, most) or '', '^%d+'))
  if oldest and oldest > math.max(ended - 64, num(counts[3])) then
    local why = int(most + 1) .. ' of the last ' .. int(ended - oldest + 1) .. ' groups were skipped'
    stop_task(keys.progress, task, why, keys.bell_trainer, keys.events)
  end
end

-- Count a failed try, and its cause: at most 8 causes of a task have a count of their own. Return the failures in a row, if they are `patience`, or `first` while nothing has succeeded, and
-- may not be the fault of one worker: the failures of one worker alone count for its share of the live workers.
local function note_failure(progress, workers, worker, lease_ms, message, cause, patience, first)
  local before, now = redis.call('HMGET', progress, 'failures_in_row', 'failing_worker', 'raw_rewards_count', 'causes'), now_ms()
  local failures = num(before[1]) + 1
  local alone = (failures == 1 or before[2] == worker) and worker or ''
  cause = 'failed:' .. (cause == '' and 'other' or cause)
  if redis.call('HEXISTS', progress, cause) == 0 then
    if num(before[4]) >= 8 then cause = 'failed:other' end
    redis.call('HINCRBY', progress, 'causes', 1)
  end
  redis.call('HINCRBY', progress, cause, 1)
  redis.call('HINCRBY', progress, 'failed', 1)
  redis.call('HSET', progress, 'failures_in_row', int(failures), 'failing_worker', alone, 'error', message, 'error_ms', int(now))
  local most = num(before[3]) == 0 and first or patience
  local share = alone == '' and 1 or math.max(1, redis.call('ZCOUNT', workers, int(now - lease_ms), '+inf'))
  return most and failures >= most * share and failures or nil
end

-- Keep these counts of a task each time that about 128 more of its groups were produced (one call may produce several),
-- and those kept before: the difference of now and `counts_before` is that of the newest 128 to 256 groups.
local function keep_counts(progress, before, produced)
  if math.floor(before / 128) == math.floor(produced / 128) then return end
  local names = {'produced_groups', 'filtered', 'dead', 'expirations', 'consumed', 'raw_rewards_count', 'truncated',
    'unparsed'}
  local found = redis.call('HMGET', progress, 'counts_kept', unpack(names))
  for i, name in ipairs(names) do names[i] = name .. '=' .. (found[i + 1] or 0) end
  redis.call('HSET', progress, 'counts_before', found[1] or '', 'counts_kept', table.concat(names, ' '))
end
