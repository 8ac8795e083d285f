#!lua flags=no-writes
-- check_leased: compare what a worker holds with the records of these groups and with its lease, at one instant.
-- KEYS leases ZSET, leased HASH, groups prefix
-- ARGV worker name  id
-- replies OK, then a text for each fault
-- keeps I1, I2

local reply, digest = {'OK'}, 0
for _, held in ipairs(held_groups(leased)) do
  local gid, token = held[1], held[2]
  digest = digest + mark_of(gid, token)
  local record = redis.call('HMGET', groups .. gid, 'stage', 'owner', 'token')
  if record[1] ~= 'running' or record[2] ~= worker or record[3] ~= token then
    reply[#reply + 1] = worker .. ' holds ' .. gid .. ', and its record does not say so'
  end
end
if num(redis.call('HGET', leased, 'digest')) ~= digest then
  reply[#reply + 1] = 'the digest of what ' .. worker .. ' holds does not fit'
end
local has_lease = redis.call('ZSCORE', leases, worker) and true or false
if has_lease ~= (digest > 0) then
  reply[#reply + 1] = worker .. (has_lease and ' has a lease and holds nothing' or ' holds groups without a lease')
end
return reply
