-- pools: the pools: how old a group counts there, in which order it is used, and how it leaves.

local fork_list, lowest_fork = nil, {}

-- I8: weights that a trainer forked away from are gone; M counts as min(M, every fork opened after its lineage).
local function living_version(lineages, lineage, version)
  lineage = lineage or ''
  local lowest = lowest_fork[lineage] or math.huge
  if not lowest_fork[lineage] then
    fork_list = fork_list or redis.call('LRANGE', lineages, -1000, -1)
    for i = #fork_list, 1, -1 do
      local name, fork = string.match(fork_list[i], '^(.*):(%d+)$')
      if name == lineage then break end
      lowest = math.min(lowest, tonumber(fork))
    end
    lowest_fork[lineage] = lowest
  end
  return lowest < tonumber(version) and int(lowest) or version
end

-- The score of a group in a pool: its version; or, with token staleness (`token_lead` steps stricter), the version of a group
-- that expires together with the first rollout of this one that has no tokens left to train.
local function pool_score(version, last, token_lead)
  if not version or version == '' then return '+inf' end
  if not token_lead or not last or last == '' then return version end
  return int(math.min(tonumber(version), tonumber(last) - token_lead))
end

-- Compute the age of a group from an argument of the type `ages`; only living versions count. Return its version and lineage, its score, the fields that only some groups have, and the version of the
-- member that expires last, at most; nil where all members are as old as the group.
local function age_of(lineages, made_by, token_lead)
  local found, newest = {oldest = {'', ''}, last = {'', ''}}, nil
  for what, lineage, version in string.gmatch(made_by, '(%l+) (%S+) (%d+)') do
    local least, living = found[what], living_version(lineages, lineage, version)
    if what == 'newest' then
      newest = math.max(newest or 0, tonumber(living))
    elseif least[1] == '' or tonumber(living) < tonumber(least[1]) then
      found[what] = {living, lineage}
    end
  end
  local oldest, last = found.oldest, found.last
  local fields = {}
  if token_lead then fields = {'last', last[1], 'last_lineage', last[2]} end
  if newest then fields[#fields + 1], fields[#fields + 2] = 'newest', int(newest) end
  return oldest[1], oldest[2], pool_score(oldest[1], last[1], token_lead), fields, newest
end

-- Return the number of a new arrival, as it stands before the gid of a member.
local function next_arrival(progress) return string.format('%010d', redis.call('HINCRBY', progress, 'arrivals', 1)) end

-- Return the gid of a member ("<arrival>:<gid>" or a gid). A pattern would try each of its digits.
local function gid_of(member) return string.sub(member, (string.find(member, ':', 1, true) or 0) + 1) end

-- Return gid and fields of some members, and these members: all are read before anything is written. A member whose record
-- is gone is left out, and stays where it is (fsck reports it); the first field is in every record.
local function records_of(groups, members, ...)
  local gids, records, kept = {}, {}, {}
  for _, member in ipairs(members) do
    local gid = gid_of(member)
    local record = redis.call('HMGET', groups .. gid, ...)
    if record[1] then
      kept[#kept + 1], gids[#kept + 1], records[#kept + 1] = member, gid, record
    end
  end
  return gids, records, kept
end

-- Return up to `count` members of a pool, none older than the cut (I8). staleness: the oldest weights first. fifo: the
-- first arrivals. The members of one version are in order of arrival, so the first of each version are merged; of more
-- than 64 versions, the newer ones wait.
local function next_in_order(order, pool, cut, count)
  if order == 'staleness' then return redis.call('ZRANGEBYSCORE', pool, cut, '+inf', 'LIMIT', 0, count) end
  local chosen, from = {}, cut
  for _ = 1, 64 do
    local member, version = unpack(redis.call('ZRANGEBYSCORE', pool, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
    if not member then break end
    if #chosen < count or member < chosen[count] then
      for _, each in ipairs(redis.call('ZRANGEBYSCORE', pool, version, version, 'LIMIT', 0, count)) do
        chosen[#chosen + 1] = each
      end
      table.sort(chosen)
      for i = #chosen, count + 1, -1 do chosen[i] = nil end
    end
    from = '(' .. version
  end
  return chosen
end

-- The keys of the task of a gid: all of them have prefixes that were passed as keys. They are read first, as in
-- found_group.
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
  local held = fields_of(record, 'stage', 'status', 'owner', 'token', 'arrival', 'lane', 'entry', 'payload', 'chunks', 'batch',
    'size', 'prompt', 'counted')
  return held.stage and held
end

-- Read the keys that are named in the fields of a record: a wrong type stops the script before it writes.
local function read_place(keys, held)
  if held and held.owner then redis.call('HLEN', keys.leased_by .. held.owner) end
  if held and held.stage == 'waiting' then redis.call('XLEN', keys.jobs .. held.lane) end
end

-- Take a group out of its place, which is no batch. Its token becomes invalid (I2). Return its stage, or the status of
-- its pool.
local function remove_from_stage(keys, gid, held)
  if held.stage == 'pool' then
    redis.call('ZREM', keys[held.status], held.arrival .. ':' .. gid)
    return held.status
  elseif held.stage == 'dead' then
    redis.call('ZREM', keys.dead, gid)
    redis.call('UNLINK', keys.dead_letters .. gid)
    redis.call('HINCRBY', keys.progress, 'dead', -1)
  elseif held.stage == 'running' then
    let_go(keys.leases, keys.leased_by .. held.owner, held.owner, {gid}, {held.token})
    redis.call('ZREM', keys.age_index, gid)
    redis.call('HINCRBY', keys.progress, 'running', -1)
    redis.call('HINCRBY', keys.progress, 'leases_lost', 1)
  else
    redis.call('XDEL', keys.jobs .. held.lane, held.entry)
    redis.call('ZREM', keys.age_index, gid)
  end
  return held.stage
end
