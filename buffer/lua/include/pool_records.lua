-- pool_records: gid_of and records_of, the gids and records of members of a pool or an age index.

-- Return the gid of a member ("<arrival>:<gid>" or a gid). A pattern would try each of its digits.
local function gid_of(member) return string.sub(member, (string.find(member, ':', 1, true) or 0) + 1) end

-- Return gid and fields of some members, and these members: all are read before anything is
-- written. A member whose record is gone is left out, and stays where it is (fsck reports it); the first field is in every
-- record.
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
