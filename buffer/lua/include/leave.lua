-- leave: takes a group out of any place but a batch; with held_fields and task_keys, which it needs.
-- include: leave_by_hand

-- The keys of a task that a script learns from a gid: all of them lie under prefixes that were passed as keys. They are
-- touched, as in retry_keys.
local function task_keys(under, task)
  local keys = {groups = under.groups, leases = under.leases, holders = under.holders, dead = under.dead,
    dead_letters = under.dead_letters, jobs = {}, progress = under.accounts .. task,
    order_index = under.orders .. task .. ':completed'}
  for _, lane in ipairs({'eval', 'resume', 'fresh'}) do
    keys.jobs[lane] = under.queues .. task .. ':' .. lane
    redis.call('XLEN', keys.jobs[lane])
  end
  for _, status in ipairs({'completed', 'aborted', 'expired'}) do
    keys[status] = under.pools .. task .. ':' .. status
    redis.call('ZCARD', keys[status])
  end
  redis.call('ZCARD', keys.order_index)
  redis.call('HLEN', keys.progress)
  return keys
end

-- What `leave` wants to know of a record, and where a payload of it lies.
local function held_fields(record)
  local names = {'stage', 'status', 'owner', 'arrival', 'lane', 'entry', 'payload', 'chunks', 'batch', 'size',
    'prompt'}
  local held = {}
  for i, value in ipairs(redis.call('HMGET', record, unpack(names))) do held[names[i]] = value or nil end
  return held.stage and held
end

-- Take a group out of where it is, whatever that is but a batch; returns that place. A lease dies with it (I2).
local function leave(keys, gid, held)
  if held.stage == 'running' then
    redis.call('ZREM', keys.leases, gid)
    redis.call('SREM', keys.holders .. held.owner, gid)
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
    return held.stage
  end
  if held.stage == 'waiting' then
    redis.call('XDEL', keys.jobs[held.lane], held.entry)
    return held.stage
  end
  return leave_by_hand(keys, gid, held.stage, held.status, held.arrival)
end
