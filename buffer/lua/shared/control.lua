-- control: the control state, and how processes learn what happened: wake-ups and the event log.

-- A limit on calls belongs to no run.
local function missing_run(key, is_made_here)
  if string.find(key, 'rmq-limit:', 1, true) == 1 then return end
  local meta = string.match(key, '^(.-}:)') .. 'meta'
  local schema = redis.call('HGET', meta, 'schema')
  if schema == 'removing' or not (schema or is_made_here) then
    return redis.error_reply('RMQ_GONE ' .. SCRIPT .. ': there is no ' .. meta .. ', or its run is being removed')
  end
end

local function log_event(events, name, ...)
  redis.call('XADD', events, 'MAXLEN', '~', '10000', '*', 'event', name, ...)
end

local function wake(bell, times)
  local wake_ups = {}
  for n = 1, math.min(times, 64 - redis.call('LLEN', bell)) do wake_ups[n] = '1' end
  if #wake_ups > 0 then redis.call('RPUSH', bell, unpack(wake_ups)) end
end

-- The first nine fields of every reply to a worker, producer or trainer (buffer/control/control.py parses them).
local function control_state(control)
  local state = redis.call('HMGET', control, 'epoch', 'mode', 'lanes', 'weights', 'weights_path', 'weights_checksum',
    'next_weights', 'next_weights_path', 'next_weights_checksum')
  for i = 1, 9 do state[i] = state[i] or '' end
  return state
end

-- The hint only saves time: a worker that misses it gets the same with its next heartbeat.
local function publish_hint(control)
  redis.call('PUBLISH', control, table.concat(control_state(control), '\0'))
end

-- Trainer and operator have a mode each: the stricter one applies, with the lanes that both leave open (I10).
local function settle_mode(control)
  local all = 'eval resume fresh'
  local strictness = {run = 0, keep = 1, drain = 2, abort = 3, finish = 4}
  local holds = redis.call('HMGET', control, 'operator_mode', 'operator_lanes', 'trainer_mode', 'trainer_lanes')
  local mode = strictness[holds[1]] > strictness[holds[3]] and holds[1] or holds[3]
  local open = {}
  for lane in string.gmatch(holds[2] or all, '%S+') do
    if string.find(' ' .. (holds[4] or all) .. ' ', ' ' .. lane .. ' ', 1, true) then open[#open + 1] = lane end
  end
  redis.call('HSET', control, 'mode', mode, 'lanes', table.concat(open, ' '), 'changed_ms', int(now_ms()))
  local epoch = redis.call('HINCRBY', control, 'epoch', 1)
  publish_hint(control)
  return epoch, mode
end

local function lane_is_open(control, lane)
  local lanes = redis.call('HGET', control, 'lanes') or ''
  return string.find(' ' .. lanes .. ' ', ' ' .. lane .. ' ', 1, true) ~= nil
end

-- Return whether the operation is new. The newest are kept: a call that arrives again behind later ones does not undo them.
local function begin_operation(key, field, operation)
  local done = redis.call('HGET', key, field) or ''
  if string.find(done, operation, 1, true) then return false end
  redis.call('HSET', key, field, string.sub(operation .. ' ' .. done, 1, 500))
  return true
end

-- I10: a worker, whose last receipt is for `acked`, reports that it has carried out a control epoch. The receipt counts if
-- that is the newest one, and, in modes in which nothing may be held, once the worker holds nothing.
local function take_receipt(worker, acked, held, bell, epoch, mode, ack)
  if ack ~= num(epoch) then return end
  local must_be_empty = mode == 'abort' or mode == 'drain' or mode == 'finish'
  if ack == acked or (must_be_empty and held > 0) then return end
  -- one wake-up is enough: the waiting process polls all receipts
  if acked < ack and redis.call('LLEN', bell) == 0 then wake(bell, 1) end
  redis.call('HSET', worker, 'ack', int(ack))
end
