-- pool_records: records_of, the records of members of a pool or an age index.

-- Return gid and fields of some members ("<arrival>:<gid>" or a gid); all are read before anything is written.
local function records_of(groups, members, ...)
  local gids, records = {}, {}
  for i, member in ipairs(members) do
    gids[i] = string.match(member, '[^:]+$')
    records[i] = redis.call('HMGET', groups .. gids[i], ...)
  end
  return gids, records
end
