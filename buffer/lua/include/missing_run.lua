-- missing_run: the error reply to a call for a run that was removed, or is being removed. Such a call would make keys
-- that no command lists.

local function missing_run(key, is_made_here)
  local meta = string.match(key, '^(.-}:)') .. 'meta'
  local schema = redis.call('HGET', meta, 'schema')
  if schema == 'removing' or not (schema or is_made_here) then
    return redis.error_reply('RMQ_GONE ' .. SCRIPT .. ': there is no ' .. meta .. ', or its run is being removed')
  end
end
