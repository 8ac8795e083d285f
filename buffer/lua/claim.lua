#!lua
-- claim: give waiting groups to a worker, each with a lease and a token of its own.
-- KEYS[1] control   HASH
-- KEYS[2] leases    ZSET
-- KEYS[3] worker    HASH     record of the worker
-- KEYS[4] holds     SET      gids that the worker holds
-- KEYS[5] groups    prefix of the group records (HASH)
-- KEYS[6] events    STREAM
-- KEYS[7+] jobs, progress  (STREAM, HASH) pairs in the order in which they are to be served
-- ARGV[1] worker    id
-- ARGV[2] nonce     of the worker's registration
-- ARGV[3] token     of this claim: new for every call, the same for a repeated one
-- ARGV[4] weights   "lineage:version" that its engine has
-- ARGV[5] lease_ms
-- ARGV[6] limit     groups at most
-- ARGV[7+] lane     of each pair
-- replies OK 6 x control, then (gid lane tries payload chunks size crc) per group | UNKNOWN | PAUSED 6 x control | STALE 6 x control
-- keeps I2 (the token fences), I10 (checked here, whatever the worker heard), I11 (a try counts now), I13 (token)
local control, leases, worker, holds, groups, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local id, nonce, token, weights = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lease_ms, limit = num(ARGV[5]), num(ARGV[6])

local known = redis.call('HMGET', worker, 'nonce', 'claim', 'claimed')
if known[1] ~= nonce then return {'UNKNOWN'} end
local reply = control_state(control)
table.insert(reply, 1, 'OK')

local function add(gid)
  local record = redis.call('HMGET', groups .. gid, 'lane', 'tries', 'payload', 'chunks', 'size', 'crc')
  reply[#reply + 1] = gid
  for k = 1, 6 do reply[#reply + 1] = record[k] or '' end
end

if known[2] == token then
  for gid in string.gmatch(known[3] or '', '%S+') do
    if redis.call('HGET', groups .. gid, 'token') == token then add(gid) end
  end
  return reply
end
if reply[4] == '' then reply[1] = 'PAUSED' return reply end
if reply[5] ~= weights then reply[1] = 'STALE' return reply end

local now, claimed = now_ms(), {}
for i = 7, #KEYS, 2 do
  local lane = ARGV[7 + (i - 7) / 2]
  if #claimed >= limit then break end
  if lane_is_open(control, lane) then
    for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', limit - #claimed)) do
      local gid = entry[2][2]
      redis.call('XDEL', KEYS[i], entry[1])
      redis.call('HINCRBY', groups .. gid, 'tries', 1)
      redis.call('HSET', groups .. gid, 'stage', 'running', 'token', token, 'owner', id, 'entry', '', 'claimed_ms', int(now))
      redis.call('ZADD', leases, int(now + lease_ms), gid)
      redis.call('SADD', holds, gid)
      redis.call('HINCRBY', KEYS[i + 1], 'running', 1)
      claimed[#claimed + 1] = gid
      add(gid)
    end
  end
end
if #claimed > 0 then
  redis.call('HSET', worker, 'claim', token, 'claimed', table.concat(claimed, ' '))
  log_event(events, 'claimed', 'worker', id, 'groups', #claimed, 'first', claimed[1])
end
return reply
