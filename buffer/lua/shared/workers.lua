-- workers: what a registration of a worker holds, and how it loses that.

-- `leased:<worker>` has the token of each held group, and their digest: the sum of the marks.
local function mark_of(gid, token) return tonumber(string.sub(redis.sha1hex(gid .. ' ' .. token), 1, 10), 16) end

-- Return the (gid, token) of each held group, in no order: as many as one worker holds.
local function held_groups(leased)
  local fields, found = redis.call('HGETALL', leased), {}
  for i = 1, #fields, 2 do
    if fields[i] ~= 'digest' then found[#found + 1] = {fields[i], fields[i + 1]} end
  end
  return found
end

local function held_count(leased) return math.max(0, redis.call('HLEN', leased) - 1) end

-- Take groups out of what a worker holds. Its lease ends with the last one.
local function let_go(leases, leased, worker, gids, tokens)
  local gone, digest = {}, 0
  for i, token in ipairs(redis.call('HMGET', leased, unpack(gids))) do
    if token then gone[#gone + 1], digest = gids[i], digest + mark_of(gids[i], tokens[i]) end
  end
  if #gone == 0 then return end
  redis.call('HDEL', leased, unpack(gone))
  digest = redis.call('HINCRBY', leased, 'digest', int(-digest))
  if digest == 0 and held_count(leased) == 0 then
    redis.call('UNLINK', leased)
    redis.call('ZREM', leases, worker)
  end
end

-- Return a held group with the keys of its task; `under`: the prefixes. All keys are read: a wrong type stops the script
-- here, before it writes anything. A group without its record has no keys (fsck reports it). It has grown if its claim
-- kept turns, and it has more tokens now than at any earlier claim: turns of agents that began again do not count.
local function found_group(under, worker, gid, token)
  local keys
  local held = redis.call('HMGET', under.groups .. gid, 'task', 'token', 'claimed_ms', 'lane', 'payload', 'tokens', 'best')
  if held[1] and held[2] == token then
    local task, lane = held[1], lane_again(held[4])
    keys = {groups = under.groups, lane = lane, jobs = under.queues .. task .. ':' .. lane, progress = under.accounts .. task,
      age_index = under.ages .. task, dead = under.dead, dead_letters = under.dead_letters}
    redis.call('XLEN', keys.jobs)
    redis.call('HLEN', keys.progress)
    redis.call('ZCARD', keys.age_index)
  end
  return {worker = worker, gid = gid, token = token, keys = keys, claimed_ms = num(held[3]),
    has_grown = has_turns_of(token, held[5] or '') and num(held[6]) > num(held[7])}
end

-- Take groups from their workers. A try is used up; if the group has grown, all of them are given back, so that they
-- count claims without progress. Return how many groups wait again, and how many are dead letters now.
local function take_back(under, found, max_tries, reason)
  local waiting, died = 0, 0
  for _, one in ipairs(found) do
    let_go(under.leases, under.leased_by .. one.worker, one.worker, {one.gid}, {one.token})
    if one.keys then
      redis.call('HINCRBY', one.keys.progress, 'running', -1)
      redis.call('HINCRBY', one.keys.progress, 'leases_lost', 1)
      local letter = letter_of('"' .. reason .. '"', one.worker)
      if one.has_grown then redis.call('HSET', under.groups .. one.gid, 'tries', 0) end
      local place = retry_or_dead_letter(one.keys, one.gid, max_tries, letter)
      log_event(under.events, 'reaped', 'gid', one.gid, 'worker', one.worker, 'place', place)
      if place == 'dead' then died = died + 1 else waiting = waiting + 1 end
    end
  end
  if waiting > 0 then wake(under.bell_workers, waiting) end
  -- a dead letter makes room for another group
  if died > 0 then wake(under.bell_producer, 1) end
  return waiting, died
end

local function forget_worker(events, name, workers, worker, record)
  local fields = {}
  for field, value in pairs(fields_of(record, 'engine', 'weights', 'joined_ms', 'seen_ms', 'report', 'quarantined', 'host')) do
    fields[#fields + 1], fields[#fields + 2] = field, value
  end
  log_event(events, name, 'worker', worker, unpack(fields))
  redis.call('ZREM', workers, worker)
  redis.call('UNLINK', record)
end
