#!lua flags=allow-oom
-- commit: archive batches: the trainer's checkpoint of step T is durable, and F is the oldest checkpoint it keeps.
-- One call archives one slice of the batches up to F; the caller repeats it until freed = F. Payloads and manifest of an
-- archived batch stay until `forget` frees them, at once or after the retention.
-- KEYS control HASH, ledger HASH, batches prefix, groups prefix, garbage SET, events STREAM, bytes HASH
-- KEYS progress, archived  HASH, STRING x0..256  of each task; archived is a bitmap
-- ARGV nonce token   of the trainer
-- ARGV step  0..     T
-- ARGV keep  0..     F
-- ARGV limit 1..500  largest number of groups to archive
-- ARGV task  name xKEYS
-- replies OK committed freed | FENCED | GAP taken | UNKNOWN_TASK gid
-- keeps I1, I6 (frees nothing that a kept checkpoint may need again), I12, I13 (step)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local steps = redis.call('HMGET', ledger, 'taken', 'committed', 'freed', 'keep', 'slice', 'awaits')
local taken, committed, freed, done = num(steps[1]), num(steps[2]), num(steps[3]), num(steps[5])
if step > taken then return {'GAP', int(taken)} end
committed = math.max(committed, step)
keep = math.min(keep, committed)

local tasks = {}
for _, progress, archived, task in each_unit do tasks[task] = {progress = progress, archived = archived} end
local batch = batches .. int(freed + 1)
local entries = {}
if freed < keep then entries = redis.call('LRANGE', batch, 1 + done, done + limit) end
local header = redis.call('LINDEX', batch, 0)
local records, prompts, ended, went, is_eval = {}, {}, {}, 0, string.find(ledger, ':eval', -5, true)
local limit_of_token = header and tonumber(string.match(header, ' tokens=(%d+)'))
-- ages as at the take, which masked the tokens
fork_list = {}
for fork in string.gmatch(header and string.match(header, ' forks=(%S+)') or '', '[^,]+') do fork_list[#fork_list + 1] = fork end
for i, entry in ipairs(entries) do
  local gid, name, draw = string.match(entry, '^((%S*)%-(%d+)) ')
  local task = tasks[name]
  if not task then return {'UNKNOWN_TASK', gid} end
  task.count = (task.count or 0) + 1
  ended[i] = {task = task, draw = tonumber(draw)}
  -- the prompt is not needed: the result has a copy of it
  records[i], prompts[i] = groups .. gid, gid .. ' init 1'
  local prompt, made, aged = unpack(redis.call('HMGET', records[i], 'prompt', 'made', 'aged'))
  local masked = 0
  for lineage, version, tokens in string.gmatch(limit_of_token and aged or '', '(%S+):(%d+):(%d+)') do
    if freed - tonumber(living_version(nil, lineage, version)) >= limit_of_token then masked = masked + tonumber(tokens) end
  end
  masked = math.min(masked, num(made))
  task.masked, task.trained = (task.masked or 0) + masked, (task.trained or 0) + num(made) - masked
  went = went + num(prompt)
end

-- F is recorded before the first slice: a half-freed manifest is never delivered again (I6)
redis.call('HSET', ledger, 'committed', int(committed), 'keep', int(math.max(keep, num(steps[4]))))
if num(steps[6]) <= committed then redis.call('HDEL', ledger, 'awaits') end  -- what a trained batch lacks, it never gets
for _, one in ipairs(ended) do redis.call('SETBIT', one.task.archived, one.draw, 1) end
for _, task in pairs(tasks) do
  if task.count then
    redis.call('HINCRBY', task.progress, 'taken', -task.count)
    redis.call('HINCRBY', task.progress, 'archived', task.count)
    add_tokens(task.progress, is_eval and 'evaluated' or 'trained', task.trained)
    add_tokens(task.progress, 'masked', task.masked)
  end
end
if #entries > 0 then
  redis.call('SADD', garbage, unpack(prompts))
  redis.call('UNLINK', unpack(records))
end
count_bytes(bytes, 0, went)
done = done + #entries
redis.call('HSET', ledger, 'slice', int(done))
if freed < keep and done >= redis.call('LLEN', batch) - 1 then
  if header then redis.call('LSET', batch, 0, header .. ' archived_ms=' .. int(now_ms())) end
  freed = freed + 1
  redis.call('HSET', ledger, 'freed', int(freed), 'slice', 0)
  log_event(events, 'archived', 'step', int(freed))
end
if step > num(steps[2]) then log_event(events, 'committed', 'step', int(step), 'keep', int(keep)) end
return {'OK', int(committed), int(freed)}
