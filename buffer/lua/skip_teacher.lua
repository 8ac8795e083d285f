#!lua flags=allow-oom
-- skip_teacher: pass on groups that wait for a teacher that the config lacks now: to their next teacher, or to the pool.
-- Any process may call it.
-- include: events, staleness, waiting, wake_ups
-- KEYS queues        prefix  of the queues (STREAM)
-- KEYS groups        prefix  of the group records (HASH)
-- KEYS progress      HASH    of the task
-- KEYS completed     ZSET    pool of the task
-- KEYS age_index     ZSET    groups of the task that wait or run, by their oldest version
-- KEYS lineages      LIST
-- KEYS bell_teachers LIST
-- KEYS bell_trainer  LIST
-- KEYS events        STREAM
-- ARGV task    name
-- ARGV teacher name
-- ARGV token_lead ''|0..  steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV limit   1..250     largest number of groups
-- replies OK passed
-- keeps I1, I8, I13 (a repeated call finds nothing)

local under = queues .. task .. ':'
local jobs, found = under .. 'teach.' .. teacher, {}
for _, entry in ipairs(redis.call('XRANGE', jobs, '-', '+', 'COUNT', limit)) do
  local one = {id = entry[1], gid = entry[2][2]}
  one.held = redis.call('HMGET', groups .. one.gid, 'payload', 'teachers', 'version', 'lineage', 'last', 'last_lineage',
    'arrival', 'sampler')
  one.lane, one.later = string.match(one.held[2] or '', '^([^,]+),?(.*)$')
  if one.lane then redis.call('XLEN', under .. 'teach.' .. one.lane) end
  found[#found + 1] = one
end
local function living(lineage, version)
  return (version or '') ~= '' and living_version(lineages, lineage, version) or ''
end
for _, one in ipairs(found) do
  local gid, record, held = one.gid, groups .. one.gid, one.held
  redis.call('XDEL', jobs, one.id)
  redis.call('HINCRBY', progress, 'teaching', -1)
  if held[1] and one.lane then
    to_waiting(under .. 'teach.' .. one.lane, record, gid, 'teach.' .. one.lane, held[1], progress)
    redis.call('HSET', record, 'teachers', one.later)
  elseif held[1] then
    local version, last = living(held[4], held[3]), living(held[6], held[5])
    redis.call('ZREM', age_index, gid)
    redis.call('HDEL', record, 'lane', 'entry', 'teachers', 'sampled', 'sampler')
    redis.call('HSET', record, 'stage', 'pool', 'owner', held[8] or '', 'version', version)
    redis.call('ZADD', completed, pool_score(version, last, token_lead), held[7] .. ':' .. gid)
  end
end
if #found > 0 then
  wake(bell_teachers, 1)
  wake(bell_trainer, 1)
  log_event(events, 'teacher_skipped', 'task', task, 'teacher', teacher, 'groups', #found)
end
return {'OK', #found}
