-- tokens: each sampled token, from its engine to the row of its task's account in which it ends (`tokens_<row>`).
-- A record has `made`: tokens of its group that are in no row yet. `worker_tokens` has the totals of a worker's process,
-- which only rise: a late or repeated call adds nothing (I13).

local function add_tokens(progress, row, tokens)
  if tokens ~= 0 then redis.call('HINCRBY', progress, 'tokens_' .. row, int(tokens)) end
end

-- Move the tokens of a group to a row.
local function end_tokens(progress, row, record)
  add_tokens(progress, row, num(redis.call('HGET', record, 'made')))
  redis.call('HDEL', record, 'made')
end

-- A process has sampled `total` tokens of a task so far, `closed` of them under claims that ended, and `claimed` more are
-- in groups and rows. What is closed and not among these was lost with a lease; if a claim that had been given up is
-- answered after all, its tokens were not.
local function hear(worker_tokens, progress, task, total, closed, claimed)
  local known = redis.call('HGET', worker_tokens, task)
  local heard, before = string.match(known or '', '^(%d+) (%d+)$')
  -- totals of a process that is known without them were counted by a server, or a run, that is gone
  if not heard and redis.call('HEXISTS', worker_tokens, 'nonce') == 0 then before = closed end
  before = num(before)
  heard = math.max(num(heard), total or before + claimed)
  local accounted = math.min(math.max(before + claimed, closed), heard)
  local now = int(heard) .. ' ' .. int(accounted)
  if now ~= known then redis.call('HSET', worker_tokens, task, now) end
  add_tokens(progress, 'lost', accounted - before - claimed)
  add_tokens(progress, 'sampled', accounted - before)
end

-- Read what a worker says of a claim: its new tokens (`counted` were counted before), those in the group that it submits,
-- those discarded as too old, and the totals of its process.
local function claimed_tokens(sampled, counted)
  local made, kept, old, total, closed = string.match(sampled, '(%d+) (%d+) (%d+) (%d+) (%d+)')
  return math.max(0, num(made) - num(counted)), num(kept), num(old), num(total), num(closed)
end

-- "task=total:closed:prompt:again" of each task, from a worker; the last two were read. All keys are read before anything
-- is written.
local function hear_all(worker_tokens, accounts, totals)
  redis.call('HLEN', worker_tokens)
  for task in string.gmatch(totals or '', '([%w_.-]+)=') do redis.call('HLEN', accounts .. task) end
  for task, total, closed, prompt, again in string.gmatch(totals or '', '([%w_.-]+)=(%d+):(%d+):(%d+):(%d+)') do
    for row, number in pairs({prompt = num(prompt), again = num(again)}) do
      local before = redis.call('HGET', worker_tokens, row .. ':' .. task)
      local known = before or redis.call('HEXISTS', worker_tokens, 'nonce') == 0 and number
      redis.call('HSET', worker_tokens, row .. ':' .. task, int(math.max(num(before), number)))
      add_tokens(accounts .. task, row, math.max(0, number - num(known or nil)))
    end
    hear(worker_tokens, accounts .. task, task, num(total), num(closed), 0)
  end
end

-- The process is gone: what it had sampled when it was last heard of, and is not accounted for, is lost with it. Its
-- totals stay for a week, in case it comes back.
local function settle_tokens(worker_tokens, accounts)
  local fields, totals = redis.call('HGETALL', worker_tokens), {}
  for i = 1, #fields, 2 do
    local heard = string.match(fields[i + 1], '^(%d+) %d+$')
    if heard then totals[#totals + 1] = fields[i] .. '=' .. heard .. ':' .. heard .. ':0:0' end
  end
  hear_all(worker_tokens, accounts, table.concat(totals, ' '))
  redis.call('PEXPIRE', worker_tokens, 604800000)
end
