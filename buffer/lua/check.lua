#!lua flags=no-writes
-- check: read the records of some groups, and find each group in every structure, at one instant. Exactly one stage is right; none or two is a fault.
-- KEYS leases ZSET, leased_by prefix, dead ZSET, ends prefix
-- KEYS completed ZSET, aborted ZSET, expired ZSET, manifests prefix, groups prefix, jobs_eval STREAM
-- KEYS jobs_resume STREAM, jobs_fresh STREAM
-- ARGV task   name
-- ARGV fields text..1024  of the records, with spaces between: those that are read below, and others
-- ARGV draw   0..69_999_999 x1..128
-- replies OK, then a text for each draw: its stages with spaces between, and the values of the fields. NUL precedes
--       each value; one that is missing is \1. Stages: waiting | running | taken | dead | archived | filtered | dropped |
--       skipped | completed:SCORE | aborted:SCORE | expired:SCORE
-- keeps I1

local names = {}
for name in string.gmatch(fields, '%S+') do names[#names + 1] = name end
local pools = {completed = completed, aborted = aborted, expired = expired}

local function stages_of(gid, n, record)
  local found, entry, owner, arrival, batch = {}, record.entry, record.owner, record.arrival, record.batch
  if entry and string.find(entry, '^%d+%-%d+$') then
    for _, jobs in ipairs({jobs_eval, jobs_resume, jobs_fresh}) do
      -- two lanes may assign the same id: within one millisecond, or after the clock was set back
      local there = redis.call('XRANGE', jobs, entry, entry)[1]
      if there and there[2][2] == gid then found[#found + 1] = 'waiting' end
    end
  end
  if owner and record.token and redis.call('HGET', leased_by .. owner, gid) == record.token and redis.call('ZSCORE', leases, owner) then
    found[#found + 1] = 'running'
  end
  for _, status in ipairs({'completed', 'aborted', 'expired'}) do
    local score = arrival and redis.call('ZSCORE', pools[status], arrival .. ':' .. gid)
    if score then found[#found + 1] = status .. ':' .. score end
  end
  if batch then
    local line = gid
    for _, name in ipairs({'payload', 'chunks', 'size', 'crc', 'samples', 'version'}) do
      local value = record[name]
      line = line .. ' ' .. ((value and value ~= '') and value or '-')
    end
    if redis.call('LPOS', manifests .. batch, line) then found[#found + 1] = 'taken' end
  end
  if redis.call('ZSCORE', dead, gid) then found[#found + 1] = 'dead' end
  for _, stage in ipairs(ENDS) do
    if redis.call('GETBIT', ends .. task .. ':' .. stage, n) == 1 then found[#found + 1] = stage end
  end
  return found
end

local reply = {'OK'}
for _, n in ipairs(draw) do
  local gid = string.format('%s-%010d', task, n)
  local values, record = redis.call('HMGET', groups .. gid, unpack(names)), {}
  for k, name in ipairs(names) do
    record[name] = values[k]
    values[k] = values[k] or '\1'
  end
  reply[#reply + 1] = table.concat(stages_of(gid, n, record), ' ') .. '\0' .. table.concat(values, '\0')
end
return reply
