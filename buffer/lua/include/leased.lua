-- leased: held_groups, held_count, mark_of and let_go, for what a worker's registration holds (I2).
-- include: numbers

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
