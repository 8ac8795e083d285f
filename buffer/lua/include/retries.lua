-- retries: lane_again, retry_keys and retry_or_dead_letter, for a group whose try was used up (I11).
-- include: ages, dead_letter, numbers, waiting

-- Return the lane of a group that was claimed from `lane` and waits again.
local function lane_again(lane) return lane == 'eval' and lane or 'resume' end

-- The keys of the task of a record: its streams and account have prefixes. All are read: a wrong type stops the script
-- here, before it writes anything.
local function retry_keys(task, lane, groups, queues, accounts, ages, dead, dead_letters)
  lane = lane_again(lane)
  local keys = {groups = groups, lane = lane, jobs = queues .. task .. ':' .. lane, progress = accounts .. task,
    age_index = ages .. task, dead = dead, dead_letters = dead_letters}
  redis.call('XLEN', keys.jobs)
  redis.call('HLEN', keys.progress)
  redis.call('ZCARD', keys.age_index)
  return keys
end

-- Return a group that used up a try to the queue; after max_tries, make it a dead letter (I11).
local function retry_or_dead_letter(keys, gid, max_tries, letter)
  local record = keys.groups .. gid
  local fields = redis.call('HMGET', record, 'tries', 'payload', 'version')
  if num(fields[1]) < max_tries then
    to_waiting(keys.jobs, record, gid, keys.lane, fields[2])
    keep_age(keys.age_index, gid, fields[2], fields[3])
    return 'waiting'
  end
  redis.call('ZREM', keys.age_index, gid)
  to_dead_letter(keys, gid, letter)
  return 'dead'
end
