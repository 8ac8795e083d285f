-- task_failures: count_cause, note_failure and stop_task, which end a task of which every try fails (I11).
-- include: clock, events, numbers, wake_ups

-- Start no more groups of a task until `resume_task`: enqueue, reissue and claim refuse it from now on.
local function stop_task(progress, task, reason, bell_trainer, events)
  redis.call('HSET', progress, 'stopped', reason)
  wake(bell_trainer, 1)
  log_event(events, 'stopped', 'task', task, 'reason', string.sub(reason, 1, 100))
end

-- Count a failed try by its cause: at most 8 causes of a task have a count of their own.
local function count_cause(progress, cause)
  cause = 'failed:' .. (cause == '' and 'other' or cause)
  if redis.call('HEXISTS', progress, cause) == 0 then
    if num(redis.call('HGET', progress, 'causes')) >= 8 then cause = 'failed:other' end
    redis.call('HINCRBY', progress, 'causes', 1)
  end
  redis.call('HINCRBY', progress, cause, 1)
end

-- Count a failed try. Return the failures in a row, if they are `patience`, or `first` while nothing has succeeded, and
-- may not be the fault of one worker: the failures of one worker alone count for its share of the live workers.
local function note_failure(progress, workers, worker, lease_ms, message, cause, patience, first)
  local before, now = redis.call('HMGET', progress, 'failures_in_row', 'failing_worker', 'raw_rewards_count'), now_ms()
  local failures = num(before[1]) + 1
  local alone = (failures == 1 or before[2] == worker) and worker or ''
  redis.call('HINCRBY', progress, 'failed', 1)
  count_cause(progress, cause)
  redis.call('HSET', progress, 'failures_in_row', int(failures), 'failing_worker', alone, 'error', message, 'error_ms', int(now))
  local most = num(before[3]) == 0 and first or patience
  local share = alone == '' and 1 or math.max(1, redis.call('ZCOUNT', workers, int(now - lease_ms), '+inf'))
  return most and failures >= most * share and failures or nil
end
