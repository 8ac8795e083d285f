-- waiting: to_waiting, which puts a group into the queue of a lane.

local function to_waiting(jobs, record, gid, lane, payload)
  local entry = redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
end
