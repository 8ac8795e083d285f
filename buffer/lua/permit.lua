#!lua flags=allow-oom
-- permit: permit calls of a service that limits them, to all processes that make some. A caller makes the calls of one
-- task in one process. It says in absolute numbers what it has and wants, so that a server that lost its data learns them
-- again. Whoever calls, the permits of the next half second are given to all callers in turn; those of others wake them.
-- The permits are spread evenly (GCRA, a leaky bucket by arrival times), so that no minute has more than its quota.
-- KEYS limit HASH, limit_queue ZSET, limit_turns HASH, limit_callers ZSET, limit_records prefix, bells prefix
-- ARGV caller    token
-- ARGV flow      text..160        its run and task: each flow has one turn, then the next flow
-- ARGV lease_ms  1..86_400_000    silence after which what the caller holds is free again
-- ARGV requests_per_minute 0..    0 = no limit
-- ARGV tokens_per_minute   0..    0 = no limit
-- ARGV at_once   0..              calls in progress; 0 = no limit
-- ARGV known     0..              permits that the caller has received
-- ARGV ended     0..              those of them whose calls have ended
-- ARGV unused    number           tokens that these had a permit for and did not use
-- ARGV refused   0..              calls that the service refused because of a limit of its own
-- ARGV pause_ms  0..86_400_000    for how long it asked to wait, the last time
-- ARGV cost      0.. x0..64       tokens of each further call that the caller wants to make
-- replies OK again_ms, then of each permit behind `known`: ms until the call may be made
-- keeps I13 (absolute numbers); slots of a dead caller are free again after its lease, other permits are lost

local SHARE = 0.975       -- of a quota: a call may arrive up to 1.5 s late and still be in the minute of its permit
local AHEAD_MS = 500      -- permits are given for this time, in which no refusal can stop them
local patience_ms = lease_ms / 10  -- a caller that has left a permit unused for so long gets no further one until it calls
local now = now_ms()
local mine = limit_records .. caller
local fields = {'permitted', 'ended', 'unused', 'refused', 'times_ms', 'costs', 'flow'}
local state = fields_of(limit, 'next_request_ms', 'next_token_ms', 'paused_ms', 'ahead_ms', 'in_use', 'turn', 'speed', 'speed_ms')
local turn, in_use = num(state.turn), num(state.in_use)

-- Runs may set a limit differently: the lowest that was set during the last lease counts. A missing one is infinite.
local function lowest(name, given)
  local known = fields_of(limit, name, name .. '_ms')
  if given == 0 then given = math.huge end
  if silence_ms(now, known[name .. '_ms']) < lease_ms and num(known[name]) < given then return num(known[name]) end
  if given < math.huge then redis.call('HSET', limit, name, int(given), name .. '_ms', int(now)) end
  return given
end

-- A new turn comes behind all earlier turns of its flow, and not before the one that is served (start-time fair queueing).
local function queue(id, of_flow)
  local tag = math.max(num(redis.call('HGET', limit_turns, of_flow)), turn)
  redis.call('HSET', limit_turns, of_flow, int(tag + 1))
  redis.call('ZADD', limit_queue, int(tag), id)
end

local function forget(id)
  local held = fields_of(limit_records .. id, 'permitted', 'ended')
  in_use = in_use - num(held.permitted) + num(held.ended)
  redis.call('UNLINK', limit_records .. id, bells .. id)
  redis.call('ZREM', limit_queue, id)
  redis.call('ZREM', limit_callers, id)
end

local grace = tick(limit, now, lease_ms)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', limit_callers, '-inf', int(now), 'LIMIT', 0, 64)) do
  if id ~= caller and now >= grace then forget(id) end
end

-- 1. what the caller reports
local before = fields_of(mine, unpack(fields))
local permitted, over = math.max(num(before.permitted), known), math.max(num(before.ended), ended)
in_use = in_use + permitted - over - num(before.permitted) + num(before.ended)
-- after a clock that was set back, the next permits are as far ahead as they were, and a pause at most a day
local furthest = now + num(state.ahead_ms)
local next_request, next_token = math.min(num(state.next_request_ms), furthest), math.min(num(state.next_token_ms), furthest)
local paused, speed = math.min(num(state.paused_ms), now + 86400000), tonumber(state.speed or 1)
if now >= paused then speed = math.min(1, speed + silence_ms(now, state.speed_ms or now) / 60000) end
if before.refused and refused > num(before.refused) then
  -- calls that were on their way when the first one was refused do not count again
  if now >= paused then speed = math.max(1 / 120, speed / 2) end
  paused = math.max(paused, now + pause_ms, now + 500 / speed)
  redis.call('HSET', limit, 'speed', string.format('%.4f', speed), 'speed_ms', int(paused))
end
local per_request = 60000 / (lowest('requests', requests_per_minute) * SHARE * speed)
local quota, slots = lowest('tokens', tokens_per_minute), lowest('at_once', at_once)
if slots < math.huge then slots = math.max(1, math.floor(slots * speed)) end
local function per_tokens(spent) return spent * 60000 / (math.max(spent, math.min(quota * SHARE, quota - spent)) * speed) end
if before.unused then next_token = next_token - per_tokens(1) * (tonumber(unused) - num(before.unused)) end

local wanted, times, skipped = {}, {}, permitted - known
for n, spent in ipairs(cost) do
  if n > skipped then wanted[#wanted + 1] = spent end
end
for at in string.gmatch(before.times_ms or '', '%S+') do times[#times + 1] = at end
while #times > skipped do table.remove(times, 1) end
redis.call('HSET', mine, 'permitted', int(permitted), 'ended', int(over), 'unused', unused, 'refused', int(refused), 'flow', flow,
  'times_ms', table.concat(times, ' '), 'costs', table.concat(wanted, ' '))
redis.call('ZADD', limit_callers, int(now + lease_ms), caller)
if #wanted == 0 then
  redis.call('ZREM', limit_queue, caller)
elseif not redis.call('ZSCORE', limit_queue, caller) then
  queue(caller, flow)
end

-- 2. the permits of the next half second
local woken, at = {}, now
for _ = 1, 256 do
  local id, tag = unpack(redis.call('ZRANGE', limit_queue, 0, 0, 'WITHSCORES'))
  at = math.max(now, next_request, next_token, paused)
  if not id or at > now + AHEAD_MS or in_use >= slots then break end
  local one = fields_of(limit_records .. id, unpack(fields))
  local spent, rest = string.match(one.costs or '', '^(%d+) ?(.*)$')
  redis.call('ZREM', limit_queue, id)
  if spent and (id == caller or num(string.match(one.times_ms, '^%S+') or now) > now - patience_ms) then
    turn, in_use = num(tag), in_use + 1
    next_request, next_token = at + per_request, at + per_tokens(num(spent))
    redis.call('HSET', limit_records .. id, 'permitted', int(num(one.permitted) + 1), 'costs', rest,
      'times_ms', one.times_ms .. (one.times_ms == '' and '' or ' ') .. int(at))
    if rest ~= '' then queue(id, one.flow) end
    if id ~= caller then woken[id] = true end
  end
end
for id in pairs(woken) do
  wake(bells .. id, 1)
  redis.call('PEXPIRE', bells .. id, int(lease_ms))
end

-- 3. the answer: the caller comes again when its turn is near, and before its lease ends
local reply, gap = {'OK', 0}, math.max(per_request, per_tokens(num(wanted[1])))
local rank = redis.call('ZRANK', limit_queue, caller)
if rank then
  local turns_ms = in_use >= slots and lease_ms or at - now - AHEAD_MS / 2 + rank * gap
  reply[2] = int(math.max(20, math.min(turns_ms, lease_ms / 3)))
elseif num(redis.call('HGET', mine, 'permitted')) > over then
  reply[2] = int(lease_ms / 3)
end
for unused_time in string.gmatch(redis.call('HGET', mine, 'times_ms'), '%S+') do
  reply[#reply + 1] = int(math.max(0, num(unused_time) - now))
end
if #wanted == 0 and permitted == over then forget(caller) end
if redis.call('ZCARD', limit_queue) == 0 then redis.call('UNLINK', limit_turns) end
redis.call('HSET', limit, 'next_request_ms', string.format('%.3f', next_request), 'next_token_ms', string.format('%.3f', next_token),
  'ahead_ms', int(math.max(0, math.ceil(math.max(next_request, next_token) - now))), 'paused_ms', int(paused), 'in_use', int(math.max(0, in_use)), 'turn', int(turn))
for _, key in ipairs({limit, limit_queue, limit_turns, limit_callers, mine}) do redis.call('PEXPIRE', key, 86400000) end
return reply
