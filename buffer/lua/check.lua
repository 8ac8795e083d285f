#!lua flags=no-writes
-- check: where one draw is, looked at from every side at one instant. One place is right; none or two is a fault.
-- KEYS[1] group       HASH     record of the group
-- KEYS[2] leases      ZSET
-- KEYS[3] dead        ZSET
-- KEYS[4] archived    STRING   bitmap
-- KEYS[5] filtered    STRING   bitmap
-- KEYS[6] dropped     STRING   bitmap
-- KEYS[7] completed   ZSET     pool of the task
-- KEYS[8] aborted     ZSET     pool of the task
-- KEYS[9] expired     ZSET     pool of the task
-- KEYS[10] batches    prefix of all manifests (LIST)
-- KEYS[11+] jobs  STREAM x0..3  of each lane
-- ARGV[1] gid  gid
-- ARGV[2] draw 0..69_999_999
-- replies OK stage, then the places that hold it: waiting | running | pool | taken | dead | archived | filtered | dropped
-- keeps I1
local group, leases, dead = KEYS[1], KEYS[2], KEYS[3]
local gid, draw = ARGV[1], ARGV[2]
local record = redis.call('HMGET', group, 'stage', 'entry', 'arrival', 'batch', 'payload', 'chunks', 'size', 'crc', 'samples', 'version')
local reply = {'OK', record[1] or ''}
local function found(place) reply[#reply + 1] = place end

for i = 11, #KEYS do
  local entry = record[2] or ''
  -- two lanes may give out the same id: in one millisecond, or where the clock was stepped back
  local there = entry ~= '' and redis.call('XRANGE', KEYS[i], entry, entry)[1]
  if there and there[2][2] == gid then found('waiting') end
end
if redis.call('ZSCORE', leases, gid) then found('running') end
for i = 7, 9 do
  if record[3] and redis.call('ZSCORE', KEYS[i], record[3] .. ':' .. gid) then found('pool') end
end
if record[4] then
  local entry = gid
  for k = 5, 10 do
    entry = entry .. ' ' .. ((record[k] and record[k] ~= '') and record[k] or '-')
  end
  if redis.call('LPOS', KEYS[10] .. record[4], entry) then found('taken') end
end
if redis.call('ZSCORE', dead, gid) then found('dead') end
for i, place in ipairs({'archived', 'filtered', 'dropped'}) do
  if redis.call('GETBIT', KEYS[3 + i], draw) == 1 then found(place) end
end
return reply
