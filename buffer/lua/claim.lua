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
local reply = {'OK', unpack(control_state(control))}
local lanes, newest = reply[4], reply[5]

local function refused(code, ...)
  reply[1] = code
  for _, fact in ipairs({...}) do reply[#reply + 1] = fact end
  return reply
end

-- Add a group to the reply, and return how often it was tried; nil if it is not held under `claimed`, or its record is gone.
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
if lanes == '' then return refused('PAUSED') end
if newest ~= weights then return refused('STALE') end
local bad, barred_ms = string.match(redis.call('HGET', bad_submissions, worker) or '', '^%d+ (%d+) (%d+)$')
if bad and barred_ms ~= '0' then return refused('BARRED', bad) end

local now, gids, tries, given, gone, full = now_ms(), {}, {}, {}, {}, nil
local stored = (low_bytes > 0 or high_bytes > 0) and held_bytes(bytes) or 0

-- Return the entries of a queue whose groups this worker may have.
local function entries_of(jobs, progress, lane)
  if not string.find(' ' .. lanes .. ' ', ' ' .. lane .. ' ', 1, true) then return {} end
  local mark = lane == 'fresh' and low_bytes or high_bytes
  local is_above = mark > 0 and stored >= mark
  local entries = redis.call('XRANGE', jobs, '-', '+', 'COUNT', is_above and 1 or limit - #gids)
  if #entries == 0 or redis.call('HEXISTS', progress, 'stopped') == 1 then return {} end
  if is_above and (#gids > 0 or is_refused(bytes, mark, leases, ledger)) then
    full = mark
    return {}
  end
  return entries
end

-- the groups of every pair are read before anything is written
for _, jobs, progress, lane in each_unit do
  if #gids >= limit then break end
  local ids = {}
  for _, entry in ipairs(entries_of(jobs, progress, lane)) do
    local id, gid = entry[1], entry[2][2]
    local tried = add(gid, 1)
    if tried then
      ids[#ids + 1], gids[#gids + 1], tries[#tries + 1] = id, gid, tried
    else
      gone[#gone + 1] = {jobs = jobs, id = id, gid = gid}
    end
  end
  if #ids > 0 then given[#given + 1] = {jobs = jobs, progress = progress, ids = ids} end
end
-- without its record a group cannot run: fsck reports it as lost
for _, one in ipairs(gone) do
  redis.call('XDEL', one.jobs, one.id)
  log_event(events, 'record_gone', 'gid', one.gid)
end
if #gids == 0 then return full and refused('FULL', int(stored), int(full)) or reply end

local tokens, before, digest = {}, num(redis.call('HGET', leased, 'digest')), 0
for i, gid in ipairs(gids) do
  tokens[2 * i - 1], tokens[2 * i] = gid, token
  digest = digest + mark_of(gid, token)
end
redis.call('HSET', leased, 'digest', int(before + digest), unpack(tokens))
if before == 0 then redis.call('ZADD', leases, 'NX', int(now + lease_ms), worker) end
for _, pair in ipairs(given) do
  redis.call('XDEL', pair.jobs, unpack(pair.ids))
  redis.call('HINCRBY', pair.progress, 'running', #pair.ids)
end
for i, gid in ipairs(gids) do
  redis.call('HSET', groups .. gid, 'tries', tries[i], 'stage', 'running', 'token', token, 'owner', worker, 'entry', '',
    'claimed_ms', int(now))
end
redis.call('HSET', worker_record, 'claim', token, 'claimed', table.concat(gids, ' '))
log_event(events, 'claimed', 'worker', worker, 'groups', #gids, 'first', gids[1])
return reply
