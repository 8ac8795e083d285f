-- prelude: what more than one script needs. Put in front of every script by buffer/scripts.py.

local function num(value) return tonumber(value or 0) or 0 end

local function now_ms()
  local time = redis.call('TIME')
  return num(time[1]) * 1000 + math.floor(num(time[2]) / 1000)
end

-- Since a holder of a role was seen. If that lies ahead of now, it is as long ago: the clock was stepped back, and
-- whoever lives has beaten since.
local function silence_ms(now, seen) return math.abs(now - num(seen)) end

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
  local rung = 0
  for _ = 1, math.min(times, 64) do rung = redis.call('RPUSH', bell, '1') end
  if rung > 64 then redis.call('LTRIM', bell, -64, -1) end
end

-- What every reply to a worker, producer or trainer tells of the control state (buffer/control.py reads it).
local function control_state(control)
  local state = redis.call('HMGET', control, 'epoch', 'mode', 'lanes', 'weights', 'weights_path', 'weights_checksum')
  for i = 1, 6 do state[i] = state[i] or '' end
  return state
end

-- I10: a hint that hurries; whoever misses it learns the same from its next heartbeat.
local function publish_hint(control)
  redis.call('PUBLISH', control, table.concat(control_state(control), '\0'))
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
  publish_hint(control)
  return epoch, mode
end

-- I10: a worker says that it has carried out a control epoch. It counts for the newest one, and where nothing may be held
-- only once nothing is.
local function take_receipt(worker, holds, bell, epoch, mode, ack)
  if ack ~= num(epoch) then return end
  local must_be_empty = mode == 'abort' or mode == 'drain' or mode == 'finish'
  if must_be_empty and redis.call('SCARD', holds) > 0 then return end
  -- who waits looks at all receipts whenever it is rung for
  if num(redis.call('HGET', worker, 'ack')) < ack and redis.call('LLEN', bell) == 0 then ring(bell, 1) end
  redis.call('HSET', worker, 'ack', int(ack))
end

-- I3: set the next draw of a task. The account gets a copy, by which nothing is decided.
local function move_cursor(cursors, progress, task, cursor)
  redis.call('HSET', cursors, task, int(cursor))
  redis.call('HSET', progress, 'cursor', int(cursor))
end

local function lane_is_open(control, lane)
  local lanes = redis.call('HGET', control, 'lanes') or ''
  return string.find(' ' .. lanes .. ' ', ' ' .. lane .. ' ', 1, true) ~= nil
end

-- Groups of a task that may still be started: target - consumed - fresh completed - waiting - running, and no more
-- than `most` of the last two. Computed in the script that starts them, so that it cannot overshoot.
local function room(progress, jobs, completed, ledger, target, threshold, most)
  local counts = redis.call('HMGET', progress, 'consumed', 'running')
  local in_flight = num(counts[2])
  for _, stream in ipairs(jobs) do in_flight = in_flight + redis.call('XLEN', stream) end
  local cut = '-inf'
  if threshold ~= '' then cut = int(num(redis.call('HGET', ledger, 'taken')) + 1 - tonumber(threshold)) end
  local free = target - num(counts[1]) - in_flight - redis.call('ZCOUNT', completed, cut, '+inf')
  return most == '' and free or math.min(free, tonumber(most) - in_flight)
end

-- I11: how many tries of a task have failed, or were filtered, one after the other; nil while it is not too many.
local function too_many_failures(progress, patience)
  local failures = num(redis.call('HGET', progress, 'failures_in_row'))
  return patience ~= '' and failures >= tonumber(patience) and failures or nil
end

-- I12: payload bytes of all groups, as absolute counters: what is held is what came less what went.
local function count_bytes(bytes, came, went)
  if came > 0 then redis.call('HINCRBY', bytes, 'came', int(came)) end
  if went > 0 then redis.call('HINCRBY', bytes, 'went', int(went)) end
end

local function held_bytes(bytes)
  local counts = redis.call('HMGET', bytes, 'came', 'went')
  return num(counts[1]) - num(counts[2])
end

-- Whether so much is held as the mark says; 0 = there is no mark.
local function is_full(bytes, mark) return mark > 0 and held_bytes(bytes) >= mark end

-- Whether nothing may be started for want of memory. Where nobody runs, and no batch is there that a checkpoint would
-- free, waiting would be for ever: then a little is started all the same.
local function is_refused(bytes, mark, leases, training)
  if not is_full(bytes, mark) then return false end
  local steps = redis.call('HMGET', training, 'taken', 'freed')
  return redis.call('ZCARD', leases) > 0 or num(steps[1]) > num(steps[2])
end

-- Payloads in the run's slot are keys from `first` on, and are seen and pinned here. In a cluster they lie elsewhere:
-- none is given, the caller is believed, and they are listed for it to pin (buffer/pins.py). `others` of the keys from
-- `first` on stand before the chunks.
local function seen_bytes(keys, first, others, chunks, said)
  if #keys < first then return said end
  local found = 0
  for i = first + others, #keys do found = found + redis.call('STRLEN', keys[i]) end
  return #keys == first - 1 + others + chunks and found or -1
end

local function pin(keys, first, unpinned, entry)
  if #keys < first then redis.call('SADD', unpinned, entry) end
  for i = first, #keys do redis.call('PERSIST', keys[i]) end
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

-- The score of a group in a pool: its version, or, with token staleness (`lag` steps stricter), the version of a group that
-- expires together with the first rollout of this one that has nothing left to train.
local function pool_score(version, last, lag)
  if not version or version == '' then return '+inf' end
  if lag == '' or not last or last == '' then return version end
  return int(math.min(tonumber(version), tonumber(last) - tonumber(lag)))
end

-- What the age of a group is counted from, of triples (oldest | last, lineage, version) in the arguments; only living
-- versions count. Returns its version and lineage, its score, and the fields that only token staleness needs.
local function age_of(lineages, args, first, lag)
  local found = {oldest = {'', ''}, last = {'', ''}}
  for i = first, #args - 2, 3 do
    local least, living = found[args[i]], living_version(lineages, args[i + 1], args[i + 2])
    if least[1] == '' or tonumber(living) < tonumber(least[1]) then found[args[i]] = {living, args[i + 1]} end
  end
  local oldest, last = found.oldest, found.last
  local fields = lag ~= '' and {'last', last[1], 'last_lineage', last[2]} or nil
  return oldest[1], oldest[2], pool_score(oldest[1], last[1], lag), fields
end

local function to_waiting(jobs, record, gid, lane, payload)
  local entry = redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
end

-- What retry_or_bury needs of a task that the script learns from a record: streams and account lie under prefixes. All
-- are touched: one of a wrong type stops the script here, before it writes anything.
local function retry_keys(task, groups, jobs, progress, dead, dead_letters)
  local keys = {groups = groups, jobs_resume = jobs .. task .. ':resume', jobs_eval = jobs .. task .. ':eval',
    progress = progress .. task, dead = dead, dead_letters = dead_letters}
  for _, stream in ipairs({keys.jobs_resume, keys.jobs_eval}) do redis.call('XLEN', stream) end
  redis.call('HLEN', keys.progress)
  return keys
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

-- Gid and fields of some members of a pool: all are read before anything is written.
local function records_of(groups, members, ...)
  local gids, records = {}, {}
  for i, member in ipairs(members) do
    gids[i] = string.match(member, ':(.*)$')
    records[i] = redis.call('HMGET', groups .. gids[i], ...)
  end
  return gids, records
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

-- The keys of a task that a script learns from a gid: all of them lie under prefixes that were passed as keys. They are
-- touched, as in retry_keys.
local function task_keys(under, task)
  local keys = {groups = under.groups, leases = under.leases, holders = under.holders, dead = under.dead,
    dead_letters = under.dead_letters, jobs = {}, order = under.orders .. task .. ':completed',
    progress = under.progress .. task}
  for _, lane in ipairs({'eval', 'resume', 'fresh'}) do
    keys.jobs[lane] = under.jobs .. task .. ':' .. lane
    redis.call('XLEN', keys.jobs[lane])
  end
  for _, status in ipairs({'completed', 'aborted', 'expired'}) do
    keys[status] = under.pools .. task .. ':' .. status
    redis.call('ZCARD', keys[status])
  end
  redis.call('ZCARD', keys.order)
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
-- 'unordered' (the index does not hold all that is ready), 'blocked' (too much of it is too old). For a glance, an index
-- that no take has settled yet is good enough.
local function next_ready(policy, pool, order, progress, cut, count, glance)
  if policy == 'staleness' then return redis.call('ZRANGEBYSCORE', pool, cut, '+inf', 'LIMIT', 0, count) end
  if policy == 'freshest' then return redis.call('ZREVRANGEBYSCORE', pool, '+inf', cut, 'LIMIT', 0, count) end
  local by = redis.call('HGET', progress, 'order_by')
  local is_known = by == policy or (glance and not by)
  if not is_known or redis.call('ZCARD', order) ~= redis.call('ZCARD', pool) then
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
