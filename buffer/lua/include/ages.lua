-- ages: keep_age and expiring_groups, for the index of the groups that wait or run and have tokens (I8).

-- A group returns to the queue with the tokens of its record, or with none. The index keeps the lower version: a fork may
-- have lowered it.
local function keep_age(age_index, gid, payload, version)
  if payload == 'init' or (version or '') == '' then
    redis.call('ZREM', age_index, gid)
  else
    redis.call('ZADD', age_index, 'LT', version, gid)
  end
end

-- Return how many groups of the index are too old for the next train step, whose staleness cut is `cut`.
local function expiring_groups(age_index, cut) return redis.call('ZCOUNT', age_index, '-inf', '(' .. cut) end
