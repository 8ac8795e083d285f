-- remove_dead_or_pooled: take a group out of a pool or out of the dead letters.

-- Take a dead or pooled group out of its place, and return that place (dead, or the status of the pool).
local function remove_dead_or_pooled(keys, gid, stage, status, arrival)
  if stage == 'dead' then
    redis.call('ZREM', keys.dead, gid)
    redis.call('UNLINK', keys.dead_letters .. gid)
    redis.call('HINCRBY', keys.progress, 'dead', -1)
    return 'dead'
  end
  redis.call('ZREM', keys[status], arrival .. ':' .. gid)
  return status
end
