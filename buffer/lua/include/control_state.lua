-- control_state: the fields of the control state that replies carry.

-- The first nine fields of every reply to a worker, producer or trainer (buffer/control/control.py parses them).
local function control_state(control)
  local state = redis.call('HMGET', control, 'epoch', 'mode', 'lanes', 'weights', 'weights_path', 'weights_checksum',
    'next_weights', 'next_weights_path', 'next_weights_checksum')
  for i = 1, 9 do state[i] = state[i] or '' end
  return state
end
