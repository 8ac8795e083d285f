#!lua flags=no-writes
-- check: find one draw in every structure at one instant. Exactly one place is right; none or two is a fault.
-- include: lanes
-- KEYS record      HASH    record of the group
-- KEYS leases      ZSET
-- KEYS leased_by   prefix  of what workers hold (HASH)
-- KEYS dead        ZSET
-- KEYS archived    STRING  bitmap
-- KEYS filtered    STRING  bitmap
-- KEYS dropped     STRING  bitmap
-- KEYS completed   ZSET    pool of the task
-- KEYS aborted     ZSET    pool of the task
-- KEYS expired     ZSET    pool of the task
-- KEYS manifests   prefix  of all manifests (LIST)
-- KEYS queues      prefix  of the queues (STREAM)
-- KEYS jobs_eval   STREAM
-- KEYS jobs_resume STREAM
-- KEYS jobs_fresh  STREAM
-- ARGV gid  gid
-- ARGV draw 0..69_999_999
-- replies OK stage, then the structures that hold it: waiting | running | pool | taken | dead | archived | filtered | dropped
-- keeps I1

local held = redis.call('HMGET', record, 'stage', 'entry', 'arrival', 'batch', 'payload', 'chunks', 'size', 'crc', 'samples', 'version', 'owner', 'token', 'lane')
local reply = {'OK', held[1] or ''}
local function found(place) reply[#reply + 1] = place end

local entry = held[2] or ''
local streams = {jobs_eval, jobs_resume, jobs_fresh}
if teacher_of(held[13]) then streams[4] = queues .. string.match(gid, '^(.*)%-%d+$') .. ':' .. held[13] end
for _, jobs in ipairs(streams) do
  -- two lanes may assign the same id: within one millisecond, or after the clock was set back
  local there = string.find(entry, '^%d+%-%d+$') and redis.call('XRANGE', jobs, entry, entry)[1]
  if there and there[2][2] == gid then found('waiting') end
end
local owner, token = held[11], held[12]
if owner and token and redis.call('HGET', leased_by .. owner, gid) == token and redis.call('ZSCORE', leases, owner) then found('running') end
for _, pool in ipairs({completed, aborted, expired}) do
  if held[3] and redis.call('ZSCORE', pool, held[3] .. ':' .. gid) then found('pool') end
end
if held[4] then
  local line = gid
  for k = 5, 10 do
    line = line .. ' ' .. ((held[k] and held[k] ~= '') and held[k] or '-')
  end
  if redis.call('LPOS', manifests .. held[4], line) then found('taken') end
end
if redis.call('ZSCORE', dead, gid) then found('dead') end
local bitmaps = {archived = archived, filtered = filtered, dropped = dropped}
for _, place in ipairs({'archived', 'filtered', 'dropped'}) do
  if redis.call('GETBIT', bitmaps[place], draw) == 1 then found(place) end
end
return reply
