-- prelude: what more than one script needs. Put in front of every script by buffer/scripts.py.

local function num(value) return tonumber(value or 0) or 0 end

local function now_ms()
  local time = redis.call('TIME')
  return num(time[1]) * 1000 + math.floor(num(time[2]) / 1000)
end

-- Lua numbers are doubles: tostring(1700000000123) would be 1.7e+12.
local function int(value) return string.format('%.0f', value) end

-- I11: when the server's clock moved by more than half a lease since a script last looked, or backwards,
-- every holder gets one whole lease to beat again before anything is reaped. Returns the end of the grace.
local function tick(clock, now, lease_ms)
  local seen = redis.call('HMGET', clock, 'seen_ms', 'grace_until_ms')
  local last, grace = tonumber(seen[1] or now), num(seen[2])
  if now < last or now - last > lease_ms / 2 then grace = now + lease_ms end
  if grace > now + lease_ms then grace = now + lease_ms end
  redis.call('HSET', clock, 'seen_ms', int(now), 'grace_until_ms', int(grace))
  return grace
end

local function log_event(events, name, ...)
  redis.call('XADD', events, 'MAXLEN', '~', '10000', '*', 'event', name, ...)
end

local function ring(bell, times)
  for _ = 1, math.min(times, 64) do redis.call('RPUSH', bell, '1') end
  redis.call('LTRIM', bell, -64, -1)
end

-- What every reply to a worker, producer or trainer tells of the control state (buffer/control.py reads it).
local function control_state(control)
  local state = redis.call('HMGET', control, 'epoch', 'mode', 'lanes', 'weights', 'weights_path', 'weights_checksum')
  for i = 1, 6 do state[i] = state[i] or '' end
  return state
end

-- Trainer and operator hold the mode apart: the stricter one rules, with the lanes that both leave open (I10).
local function settle_mode(control)
  local all = 'eval resume fresh'
  local strictness = {run = 0, keep = 1, drain = 2, abort = 3, finish = 4}
  local holds = redis.call('HMGET', control, 'operator_mode', 'operator_lanes', 'trainer_mode', 'trainer_lanes')
  local mode = strictness[holds[1]] > strictness[holds[3]] and holds[1] or holds[3]
  local open = {}
  for lane in string.gmatch(holds[2] or all, '%S+') do
    if string.find(' ' .. (holds[4] or all) .. ' ', ' ' .. lane .. ' ', 1, true) then open[#open + 1] = lane end
  end
  redis.call('HSET', control, 'mode', mode, 'lanes', table.concat(open, ' '), 'changed_ms', int(now_ms()))
  local epoch = redis.call('HINCRBY', control, 'epoch', 1)
  redis.call('PUBLISH', control, epoch)
  return epoch, mode
end

local function lane_is_open(control, lane)
  local lanes = redis.call('HGET', control, 'lanes') or ''
  return string.find(' ' .. lanes .. ' ', ' ' .. lane .. ' ', 1, true) ~= nil
end

-- Groups of a task that may still be started: target - consumed - fresh completed - waiting - running - judging.
-- Computed in the script that starts them, so that it cannot overshoot.
local function room(progress, jobs, completed, ledger, target, threshold)
  local counts = redis.call('HMGET', progress, 'consumed', 'running', 'judging')
  local used = num(counts[1]) + num(counts[2]) + num(counts[3])
  for _, stream in ipairs(jobs) do used = used + redis.call('XLEN', stream) end
  local cut = '-inf'
  if threshold ~= '' then cut = int(num(redis.call('HGET', ledger, 'taken')) + 1 - tonumber(threshold)) end
  return target - used - redis.call('ZCOUNT', completed, cut, '+inf')
end

-- I8: weights that a trainer forked away from are gone; M counts as min(M, every fork opened after its lineage).
local function living_version(lineages, lineage, version)
  local forks = redis.call('LRANGE', lineages, -1000, -1)
  for i = #forks, 1, -1 do
    local name, fork = string.match(forks[i], '^(.*):(%d+)$')
    if name == lineage then break end
    if tonumber(fork) < tonumber(version) then version = fork end
  end
  return version
end

local function to_waiting(jobs, record, gid, lane, payload)
  local entry = redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
end

-- A try was used up: the group waits again, or is a dead letter after max_tries (I11).
local function retry_or_bury(keys, gid, max_tries, reason)
  local record = keys.groups .. gid
  local fields = redis.call('HMGET', record, 'tries', 'lane', 'payload')
  if num(fields[1]) < max_tries then
    local lane, jobs = 'resume', keys.jobs_resume
    if fields[2] == 'eval' then lane, jobs = 'eval', keys.jobs_eval end
    to_waiting(jobs, record, gid, lane, fields[3])
    return 'waiting'
  end
  redis.call('HSET', record, 'stage', 'dead', 'status', 'failed', 'token', '')
  redis.call('ZADD', keys.dead, int(now_ms()), gid)
  redis.call('SET', keys.dead_letters .. gid, reason)
  redis.call('HINCRBY', keys.progress, 'dead', 1)
  return 'dead'
end

-- What a manifest says of a group: "gid token chunks size crc samples version", '-' for what it does not have.
local function manifest_line(groups, gid)
  local record = redis.call('HMGET', groups .. gid, 'payload', 'chunks', 'size', 'crc', 'samples', 'version')
  for k = 1, 6 do if not record[k] or record[k] == '' then record[k] = '-' end end
  return gid .. ' ' .. table.concat(record, ' ')
end

-- Where a draw without a record has ended; nil if it has not.
local function ended_place(bitmaps, draw)
  for _, place in ipairs({'archived', 'filtered', 'dropped'}) do
    if redis.call('GETBIT', bitmaps[place], draw) == 1 then return place end
  end
end

-- Take a dead or pooled group out of where it is; returns that place (dead, or the status of the pool).
local function leave_by_hand(keys, gid, stage, status, arrival)
  if stage == 'dead' then
    redis.call('ZREM', keys.dead, gid)
    redis.call('UNLINK', keys.dead_letters .. gid)
    redis.call('HINCRBY', keys.progress, 'dead', -1)
    return 'dead'
  end
  redis.call('ZREM', keys[status], arrival .. ':' .. gid)
  if status == 'completed' then redis.call('ZREM', keys.order, arrival .. ':' .. gid) end
  return status
end

-- Put a completed group where `place` says: arrival, bucket:<n> (buckets take turns) or a score; '' = no index.
local function put_in_order(order, progress, place, arrival, gid)
  if place == '' then return end
  if place == 'arrival' then
    place = arrival
  elseif string.match(place, '^bucket:%d+$') then
    local turns = place
    local rounds = redis.call('HMGET', progress, turns, 'order_round')
    place = int(math.max(num(rounds[1]), num(rounds[2])) + 1)
    redis.call('HSET', progress, turns, place)
  end
  redis.call('ZADD', order, place, arrival .. ':' .. gid)
end

-- The next groups of a pool in the order of the run's policy, none older than the cut (I8); and what stands in the way:
-- 'unordered' (the index does not hold all that is ready), 'blocked' (too much of it is too old).
local function next_ready(policy, pool, order, progress, cut, count)
  if policy == 'staleness' then return redis.call('ZRANGEBYSCORE', pool, cut, '+inf', 'LIMIT', 0, count) end
  if policy == 'freshest' then return redis.call('ZREVRANGEBYSCORE', pool, '+inf', cut, 'LIMIT', 0, count) end
  if redis.call('HGET', progress, 'order_by') ~= policy or redis.call('ZCARD', order) ~= redis.call('ZCARD', pool) then
    if redis.call('ZCARD', pool) > 0 then return {}, 'unordered' end
  end
  local chosen, start, oldest = {}, 0, tonumber(cut) or -math.huge
  while #chosen < count do
    local members = redis.call('ZRANGE', order, start, start + 499)
    if #members == 0 then return chosen end
    if start > count + 2000 then return {}, 'blocked' end
    for i, version in ipairs(redis.call('ZMSCORE', pool, unpack(members))) do
      local is_young = version and (version == 'inf' or tonumber(version) >= oldest)
      if is_young and #chosen < count then chosen[#chosen + 1] = members[i] end
    end
    start = start + 500
  end
  return chosen
end

-- Remove groups that are taken from the pool and its index; the clock of length_fair goes on with the last one.
local function take_out(pool, order, progress, members)
  if #members == 0 then return end
  local round = tonumber(redis.call('ZSCORE', order, members[#members]) or '') or 0
  if round < math.huge and round > (tonumber(redis.call('HGET', progress, 'order_round') or '') or 0) then
    redis.call('HSET', progress, 'order_round', string.format('%.17g', round))
  end
  redis.call('ZREM', order, unpack(members))
  redis.call('ZREM', pool, unpack(members))
end
