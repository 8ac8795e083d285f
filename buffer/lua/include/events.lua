-- events: log_event, which adds to the event log of the run.

local function log_event(events, name, ...)
  redis.call('XADD', events, 'MAXLEN', '~', '10000', '*', 'event', name, ...)
end
