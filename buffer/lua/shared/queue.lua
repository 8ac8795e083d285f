-- queue: the next draws of a task, its waiting groups, and how many more may be started.

local function next_draw(cursors, task) return num(redis.call('HGET', cursors, task)) end

-- The account gets a copy for people; no script reads it.
local function move_cursor(cursors, progress, task, cursor)
  redis.call('HSET', cursors, task, int(cursor))
  redis.call('HSET', progress, 'cursor', int(cursor))
end

-- A group returns to the queue with the tokens of its record, or with none. The index keeps the lower version: a fork may
-- have lowered it.
local function keep_age(age_index, gid, payload, version)
  if payload == 'init' or (version or '') == '' then
    redis.call('ZREM', age_index, gid)
  else
    redis.call('ZADD', age_index, 'LT', version, gid)
  end
end

-- Return the id of the entry.
local function add_job(jobs, gid, payload) return redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload) end

local function to_waiting(jobs, record, gid, lane, payload)
  local entry = add_job(jobs, gid, payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
end

-- Return the groups of a task that may still be started: target - consumed - fresh completed - waiting - running, with at
-- most `max_in_flight` of the last two. Of an evaluation, whose target is a draw: target - `drawn`, since each is drawn
-- once. Those of them that can serve no train step any more are not counted: others are started in their stead. Computed
-- in the script that starts them, so that it cannot overshoot.
local function room(progress, jobs, completed, age_index, ledger, target, threshold, max_in_flight, drawn)
  local counts = redis.call('HMGET', progress, 'consumed', 'running')
  local in_flight = num(counts[2])
  for _, stream in ipairs(jobs) do in_flight = in_flight + redis.call('XLEN', stream) end
  local cut, expiring = '-inf', 0
  if threshold then
    cut = int(next_step(ledger) - threshold)
    expiring = redis.call('ZCOUNT', age_index, '-inf', '(' .. cut)
  end
  local free = target - (drawn or num(counts[1]) + in_flight - expiring + redis.call('ZCOUNT', completed, cut, '+inf'))
  return max_in_flight and math.min(free, max_in_flight - in_flight) or free
end

-- Return the lane of a group that was claimed from `lane` and waits again.
local function lane_again(lane) return lane == 'eval' and lane or 'resume' end

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
