#!lua
-- claim: give waiting groups to a worker, under the token of this call. The worker's lease begins with the first group
-- that it holds; only heartbeats renew it.
-- KEYS control HASH*, leases ZSET, worker_record HASH*, leased HASH*, groups prefix, events STREAM*
-- KEYS bytes HASH*, ledger HASH*, bad_submissions HASH*
-- KEYS jobs, progress  STREAM*, HASH* x0..1024  pairs in the order in which to serve them
-- ARGV worker     name           id
-- ARGV nonce      token          of the worker's registration
-- ARGV token      token          of this claim: new for every call, the same for a repeated one
-- ARGV weights    weights        "lineage:version" that its engine has
-- ARGV lease_ms   1..86_400_000
-- ARGV limit      1..128         largest number of groups
-- ARGV low_bytes  0..            payload bytes of the run from which no fresh group is assigned; 0 = no bound
-- ARGV high_bytes 0..            the same for all groups
-- ARGV lane  eval|resume|fresh xKEYS
-- replies OK 9 x control, then (gid lane tries payload chunks size crc aborts) per group | UNKNOWN | PAUSED 9 x control | STALE 9 x control
--       | FULL 9 x control held mark (groups wait, but none may be started) | BARRED 9 x control bad (see quarantine)
-- keeps I2 (the token fences), I10 (checked here, even if the worker missed a message), I11 (a try counts now; a barred worker gets none, and nobody a group of a stopped task), I12, I13 (token)

local known = redis.call('HMGET', worker_record, 'nonce', 'claim', 'claimed')
if known[1] ~= nonce then return {'UNKNOWN'} end
local reply = control_state(control)
table.insert(reply, 1, 'OK')

-- Return how often the group was tried; nil if it is not held under `claimed`, or its record is gone.
local function add(gid, new_tries, claimed)
  local record = redis.call('HMGET', groups .. gid, 'lane', 'tries', 'payload', 'chunks', 'size', 'crc', 'aborts', 'token')
  if not record[3] or (claimed and record[8] ~= claimed) then return end
  reply[#reply + 1] = gid
  record[2] = int(num(record[2]) + new_tries)
  for k = 1, 7 do reply[#reply + 1] = record[k] or '' end
  return record[2]
end

if known[2] == token then
  for gid in string.gmatch(known[3] or '', '%S+') do add(gid, 0, token) end
  return reply
end
local open = reply[4]
if open == '' then reply[1] = 'PAUSED' return reply end
if reply[5] ~= weights then reply[1] = 'STALE' return reply end
local bad, barred_ms = string.match(redis.call('HGET', bad_submissions, worker) or '', '^%d+ (%d+) (%d+)$')
if bad and barred_ms ~= '0' then
  reply[1] = 'BARRED'
  reply[#reply + 1] = bad
  return reply
end

-- the groups of every pair are read before anything is written
local now, claimed, given, lost, refused = now_ms(), {}, {}, {}, nil
open = ' ' .. open .. ' '
local has_marks = low_bytes > 0 or high_bytes > 0
local stored = has_marks and held_bytes(bytes) or 0
for n, jobs, progress, lane in each_unit do
  if #claimed >= limit then break end
  if string.find(open, ' ' .. lane .. ' ', 1, true) then
    local byte_limit = lane == 'fresh' and low_bytes or high_bytes
    local is_above = byte_limit > 0 and stored >= byte_limit
    local entries = redis.call('XRANGE', jobs, '-', '+', 'COUNT', is_above and 1 or limit - #claimed)
    if #entries == 0 or redis.call('HEXISTS', progress, 'stopped') == 1 then
      entries = {}
    elseif is_above and (#claimed > 0 or is_refused(bytes, byte_limit, leases, ledger)) then
      entries, refused = {}, byte_limit
    end
    local ids = {}
    for _, entry in ipairs(entries) do
      local gid = entry[2][2]
      local tries = add(gid, 1)
      if tries then
        ids[#ids + 1], claimed[#claimed + 1] = entry[1], {gid = gid, tries = tries}
      else
        lost[#lost + 1] = {jobs = jobs, id = entry[1], gid = gid}
      end
    end
    if #ids > 0 then given[n] = ids end
  end
end
-- without its record a group cannot run: fsck reports it as lost
for _, one in ipairs(lost) do
  redis.call('XDEL', one.jobs, one.id)
  log_event(events, 'record_gone', 'gid', one.gid)
end
if #claimed == 0 then
  if refused then
    reply[1] = 'FULL'
    reply[#reply + 1] = int(stored)
    reply[#reply + 1] = int(refused)
  end
  return reply
end

local gids, tokens, digest = {}, {}, 0
for i, one in ipairs(claimed) do
  gids[i], tokens[2 * i - 1], tokens[2 * i] = one.gid, one.gid, token
  digest = digest + mark_of(one.gid, token)
end
local before = num(redis.call('HGET', leased, 'digest'))
redis.call('HSET', leased, 'digest', int(before + digest), unpack(tokens))
if before == 0 then redis.call('ZADD', leases, 'NX', int(now + lease_ms), worker) end
for n, jobs, progress in each_unit do
  if given[n] then
    redis.call('XDEL', jobs, unpack(given[n]))
    redis.call('HINCRBY', progress, 'running', #given[n])
  end
end
for _, one in ipairs(claimed) do
  redis.call('HSET', groups .. one.gid, 'tries', one.tries, 'stage', 'running', 'token', token, 'owner', worker, 'entry', '',
    'claimed_ms', int(now))
end
redis.call('HSET', worker_record, 'claim', token, 'claimed', table.concat(gids, ' '))
log_event(events, 'claimed', 'worker', worker, 'groups', #claimed, 'first', claimed[1].gid)
return reply
