-- waiting: add_job and to_waiting, which put a group into the queue of a lane.

-- Return the id of the entry.
local function add_job(jobs, gid, payload) return redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload) end

local function to_waiting(jobs, record, gid, lane, payload)
  local entry = add_job(jobs, gid, payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
end
