-- open_lanes: lane_is_open, whether a lane may be claimed.

local function lane_is_open(control, lane)
  local lanes = redis.call('HGET', control, 'lanes') or ''
  return string.find(' ' .. lanes .. ' ', ' ' .. lane .. ' ', 1, true) ~= nil
end
