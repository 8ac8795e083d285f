#!lua flags=no-writes
-- tokens: read the account of sampled tokens of some tasks, and add up those of groups that wait, run or are taken, all at
-- one instant. What an account has beside these is in pools.
-- KEYS workers ZSET, worker_tokens_of prefix, leases ZSET, leased_by prefix, groups prefix, manifests prefix
-- KEYS ledger_train HASH, ledger_eval HASH
-- KEYS progress, jobs_eval, jobs_resume  HASH, STREAM, STREAM x0..256  of each task
-- ARGV fields text..1024   of `progress`, with spaces between
-- ARGV limit  1..1_000_000 groups that are read at most
-- ARGV task   name xKEYS
-- replies OK, then of each task: these fields, what workers reported and no group or row has, then 3 numbers of tokens, of
--       groups that wait, run and are taken, all -1 if these are more groups than the limit
-- keeps I1

local counts, names, seen = {}, {}, 0
local function add(gid, stage)
  seen = seen + 1
  local held = seen <= limit and redis.call('HMGET', groups .. gid, 'task', 'stage', 'made') or {}
  local of = held[2] == stage and counts[held[1]]
  if of then of[stage] = of[stage] + num(held[3]) end
end

for name in string.gmatch(fields, '%S+') do names[#names + 1] = name end
for _, progress, jobs_eval, jobs_resume, task in each_unit do
  counts[task] = {waiting = 0, running = 0, taken = 0, reported = 0}
  for _, jobs in ipairs({jobs_eval, jobs_resume}) do
    for _, entry in ipairs(redis.call('XRANGE', jobs, '-', '+', 'COUNT', limit + 1)) do
      if entry[2][4] ~= 'init' then add(entry[2][2], 'waiting') end
    end
  end
end
for _, worker in ipairs(redis.call('ZRANGE', leases, 0, limit)) do
  for _, held in ipairs(held_groups(leased_by .. worker)) do add(held[1], 'running') end
end
for name, ledger in pairs({train = ledger_train, eval = ledger_eval}) do
  local steps = redis.call('HMGET', ledger, 'taken', 'freed')
  for step = num(steps[2]) + 1, num(steps[1]) do
    if seen > limit then break end
    local batch = manifests .. name .. ':' .. int(step)
    for _, line in ipairs(redis.call('LRANGE', batch, 1, -1)) do add(string.match(line, '^%S+'), 'taken') end
  end
end
local worker_limit = 50000  -- ten times the largest fleet that was measured (benchmarks/README.md)
for _, worker in ipairs(redis.call('ZRANGE', workers, 0, worker_limit - 1)) do
  local worker_tokens = worker_tokens_of .. worker
  local totals = redis.call('HGETALL', worker_tokens)
  for i = 1, #totals, 2 do
    local heard, accounted = string.match(totals[i + 1], '^(%d+) (%d+)$')
    local of = heard and counts[totals[i]]
    if of then of.reported = of.reported + heard - accounted end
  end
end

local reply = {'OK'}
for _, progress, jobs_eval, jobs_resume, task in each_unit do
  local of = counts[task]
  for _, number in ipairs(redis.call('HMGET', progress, unpack(names))) do reply[#reply + 1] = num(number) end
  reply[#reply + 1] = of.reported
  for _, stage in ipairs({'waiting', 'running', 'taken'}) do reply[#reply + 1] = seen <= limit and of[stage] or -1 end
end
return reply
