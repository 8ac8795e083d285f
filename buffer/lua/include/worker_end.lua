-- worker_end: log_worker_end, which logs that a worker is gone, with the last numbers of its record.
-- include: events

local LAST_FIELDS = {'engine', 'weights', 'joined_ms', 'seen_ms', 'report', 'quarantined', 'host'}

local function log_worker_end(events, name, worker, record)
  local values, fields = redis.call('HMGET', record, unpack(LAST_FIELDS)), {}
  for i, value in ipairs(values) do
    if value then
      fields[#fields + 1] = LAST_FIELDS[i]
      fields[#fields + 1] = value
    end
  end
  log_event(events, name, 'worker', worker, unpack(fields))
end
