-- pool_records: records_of, the records of members of a pool or an age index.

-- Return gid and fields of some members ("<arrival>:<gid>" or a gid), and these members: all are read before anything is
-- written. A member whose record is gone is left out, and stays where it is (fsck reports it); the first field is in every
-- record.
local function records_of(groups, members, ...)
  local gids, records, kept = {}, {}, {}
  for _, member in ipairs(members) do
    local gid = string.match(member, '[^:]+$')
    local record = redis.call('HMGET', groups .. gid, ...)
    if record[1] then
      kept[#kept + 1], gids[#kept + 1], records[#kept + 1] = member, gid, record
    end
  end
  return gids, records, kept
end
