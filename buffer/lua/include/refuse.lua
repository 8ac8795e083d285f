-- refuse: the error reply to a key or an argument that does not fit the header.

local find, call = string.find, redis.call

local function refuse(what, want, got)
  local shown = string.gsub(string.sub(got or 'nothing', 1, 80), '[^\032-\126]', '?')
  return redis.error_reply('RMQ_ARG ' .. SCRIPT .. ': ' .. what .. ' must be ' .. want .. ', got ' .. shown)
end
