-- waiting: add_job and to_waiting, which put a group into the queue of a lane.
-- include: lanes

-- Return the id of the entry.
local function add_job(jobs, gid, payload) return redis.call('XADD', jobs, '*', 'gid', gid, 'payload', payload) end

local function to_waiting(jobs, record, gid, lane, payload, progress)
  local entry = add_job(jobs, gid, payload)
  redis.call('HSET', record, 'stage', 'waiting', 'lane', lane, 'token', '', 'owner', '', 'entry', entry)
  if teacher_of(lane) then redis.call('HINCRBY', progress, 'teaching', 1) end
end
