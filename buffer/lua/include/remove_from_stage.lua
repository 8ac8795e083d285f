-- remove_from_stage: take a group out of any place but a batch; with held_fields and task_keys, which it needs.
-- include: leased, remove_dead_or_pooled

-- The keys of the task of a gid: all of them have prefixes that were passed as keys. They are read first, as in
-- retry_keys.
local function task_keys(under, task)
  local keys = {groups = under.groups, leases = under.leases, leased_by = under.leased_by, dead = under.dead,
    dead_letters = under.dead_letters, jobs = under.queues .. task .. ':', progress = under.accounts .. task,
    age_index = under.ages .. task}
  for _, lane in ipairs({'eval', 'resume', 'fresh'}) do
    redis.call('XLEN', keys.jobs .. lane)
  end
  for _, status in ipairs({'completed', 'aborted', 'expired'}) do
    keys[status] = under.pools .. task .. ':' .. status
    redis.call('ZCARD', keys[status])
  end
  redis.call('ZCARD', keys.age_index)
  redis.call('HLEN', keys.progress)
  return keys
end

-- The fields of a record that `remove_from_stage` needs, and the key of its payload.
local function held_fields(record)
  local names = {'stage', 'status', 'owner', 'token', 'arrival', 'lane', 'entry', 'payload', 'chunks', 'batch', 'size',
    'prompt'}
  local held = {}
  for i, value in ipairs(redis.call('HMGET', record, unpack(names))) do held[names[i]] = value or nil end
  return held.stage and held
end

-- Read the keys that are named in the fields of a record: a wrong type stops the script before it writes.
local function read_place(keys, held)
  if held and held.owner then redis.call('HLEN', keys.leased_by .. held.owner) end
  if held and held.stage == 'waiting' then redis.call('XLEN', keys.jobs .. held.lane) end
end

-- Take a group out of its place, which is no batch, and return that place. Its token becomes invalid (I2).
local function remove_from_stage(keys, gid, held)
  if held.stage == 'running' then
    let_go(keys.leases, keys.leased_by .. held.owner, held.owner, {gid}, {held.token})
    redis.call('ZREM', keys.age_index, gid)
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
    return held.stage
  end
  if held.stage == 'waiting' then
    redis.call('XDEL', keys.jobs .. held.lane, held.entry)
    redis.call('ZREM', keys.age_index, gid)
    return held.stage
  end
  return remove_dead_or_pooled(keys, gid, held.stage, held.status, held.arrival)
end
