#!lua
-- claim: give waiting groups to a worker, each with a lease and a token.
-- include: clock, control_state, events, memory_marks, numbers, open_lanes
-- KEYS control       HASH*
-- KEYS leases        ZSET
-- KEYS worker_record HASH*    record of the worker
-- KEYS holds         SET      gids that the worker holds
-- KEYS groups        prefix   of the group records (HASH)
-- KEYS events        STREAM*
-- KEYS bytes         HASH*
-- KEYS ledger        HASH*    of the trainer
-- KEYS suspects      HASH*    "since_ms bad barred_ms" by worker
-- KEYS jobs, progress  STREAM*, HASH x0..1024  pairs in the order in which to serve them
-- ARGV worker     name           id
-- ARGV nonce      token          of the worker's registration
-- ARGV token      token          of this claim: new for every call, the same for a repeated one
-- ARGV weights    weights        "lineage:version" that its engine has
-- ARGV lease_ms   1..86_400_000
-- ARGV limit      1..128         largest number of groups
-- ARGV low_bytes  0..            payload bytes of the run from which no fresh group is assigned; 0 = no bound
-- ARGV high_bytes 0..            the same for all groups
-- ARGV lane  eval|resume|fresh xKEYS
-- replies OK 6 x control, then (gid lane tries payload chunks size crc aborts) per group | UNKNOWN | PAUSED 6 x control | STALE 6 x control
--       | FULL 6 x control held mark (groups wait, but none may be started) | BARRED 6 x control bad (see quarantine)
-- keeps I2 (the token fences), I10 (checked here, even if the worker missed a message), I11 (a try counts now; a barred worker gets none, and nobody a group of a stopped task), I12, I13 (token)

local known = redis.call('HMGET', worker_record, 'nonce', 'claim', 'claimed')
if known[1] ~= nonce then return {'UNKNOWN'} end
local reply = control_state(control)
table.insert(reply, 1, 'OK')

local function add(gid, new_tries)
  local record = redis.call('HMGET', groups .. gid, 'lane', 'tries', 'payload', 'chunks', 'size', 'crc', 'aborts')
  reply[#reply + 1] = gid
  record[2] = int(num(record[2]) + new_tries)
  for k = 1, 7 do reply[#reply + 1] = record[k] or '' end
end

if known[2] == token then
  for gid in string.gmatch(known[3] or '', '%S+') do
    if redis.call('HGET', groups .. gid, 'token') == token then add(gid, 0) end
  end
  return reply
end
if reply[4] == '' then reply[1] = 'PAUSED' return reply end
if reply[5] ~= weights then reply[1] = 'STALE' return reply end
local bad, barred_ms = string.match(redis.call('HGET', suspects, worker) or '', '^%d+ (%d+) (%d+)$')
if bad and barred_ms ~= '0' then
  reply[1] = 'BARRED'
  reply[#reply + 1] = bad
  return reply
end

-- the groups of every pair are read before anything is written
local now, claimed, given, refused = now_ms(), {}, {}, nil
for n, jobs, progress, lane in each_unit do
  if #claimed >= limit then break end
  local mark = lane == 'fresh' and low_bytes or high_bytes
  local is_open = lane_is_open(control, lane) and redis.call('HEXISTS', progress, 'stopped') == 0
  if is_open and is_full(bytes, mark) and (#claimed > 0 or is_refused(bytes, mark, leases, ledger)) then
    if redis.call('XLEN', jobs) > 0 then refused = mark end
  elseif is_open then
    given[n] = redis.call('XRANGE', jobs, '-', '+', 'COUNT', is_full(bytes, mark) and 1 or limit - #claimed)
    for _, entry in ipairs(given[n]) do
      claimed[#claimed + 1] = entry[2][2]
      add(entry[2][2], 1)
    end
  end
end
for n, jobs, progress in each_unit do
  for _, entry in ipairs(given[n] or {}) do
    local gid = entry[2][2]
    redis.call('XDEL', jobs, entry[1])
    redis.call('HINCRBY', groups .. gid, 'tries', 1)
    redis.call('HSET', groups .. gid, 'stage', 'running', 'token', token, 'owner', worker, 'entry', '', 'claimed_ms', int(now))
    redis.call('ZADD', leases, int(now + lease_ms), gid)
    redis.call('SADD', holds, gid)
    redis.call('HINCRBY', progress, 'running', 1)
  end
end
if #claimed > 0 then
  redis.call('HSET', worker_record, 'claim', token, 'claimed', table.concat(claimed, ' '))
  log_event(events, 'claimed', 'worker', worker, 'groups', #claimed, 'first', claimed[1])
elseif refused then
  reply[1] = 'FULL'
  reply[#reply + 1] = int(held_bytes(bytes))
  reply[#reply + 1] = int(refused)
end
return reply
