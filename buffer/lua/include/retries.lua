-- retries: retry_keys and retry_or_dead_letter, for a group whose try was used up (I11).
-- include: ages, dead_letter, numbers, waiting

-- The keys of the task of a record: its streams and account have prefixes. All are read: a wrong type stops the script
-- here, before it writes anything.
local function retry_keys(task, groups, queues, accounts, ages, dead, dead_letters)
  local keys = {groups = groups, jobs_resume = queues .. task .. ':resume', jobs_eval = queues .. task .. ':eval',
    progress = accounts .. task, age_index = ages .. task, dead = dead, dead_letters = dead_letters}
  for _, stream in ipairs({keys.jobs_resume, keys.jobs_eval}) do redis.call('XLEN', stream) end
  redis.call('HLEN', keys.progress)
  redis.call('ZCARD', keys.age_index)
  return keys
end

-- Return a group that used up a try to the queue; after max_tries, make it a dead letter (I11).
local function retry_or_dead_letter(keys, gid, max_tries, letter)
  local record = keys.groups .. gid
  local fields = redis.call('HMGET', record, 'tries', 'lane', 'payload', 'version')
  if num(fields[1]) < max_tries then
    local lane, jobs = 'resume', keys.jobs_resume
    if fields[2] == 'eval' then lane, jobs = 'eval', keys.jobs_eval end
    to_waiting(jobs, record, gid, lane, fields[3])
    keep_age(keys.age_index, gid, fields[3], fields[4])
    return 'waiting'
  end
  redis.call('ZREM', keys.age_index, gid)
  to_dead_letter(keys, gid, letter)
  return 'dead'
end
