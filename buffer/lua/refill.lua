#!lua flags=allow-oom
-- refill: fill open positions of a taken, uncommitted batch (see quarantine.lua) with ready groups of their task. While
-- some stay open, ledger and progress name the step and the number of groups: the producer starts them, and all scripts
-- keep groups that this step can use (`next_step`).
-- KEYS control HASH, ledger HASH, batch LIST, groups prefix, completed ZSET, progress HASH
-- KEYS bell_producer LIST, events STREAM
-- ARGV nonce token  of the trainer
-- ARGV step  0..    T
-- ARGV task  name
-- replies OK filled open (positions that still are) | FENCED | RECOVERING | COMMITTED committed | NOT_TAKEN
--       | DAMAGED record (it is gone: nothing was done)
-- keeps I1, I5 (the record shows which group replaced which), I7, I8 (the cut of the header), I13 (a position is filled once)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
if redis.call('HGET', control, 'recovering') then return {'RECOVERING'} end
local committed = num(redis.call('HGET', ledger, 'committed'))
if step <= committed then return {'COMMITTED', int(committed)} end
local header = redis.call('LINDEX', batch, 0)
if not header then return {'NOT_TAKEN'} end
local before, noted = string.match(header, '^(.* quarantined=)(%S+)')
local notes, open = {}, {}
for note in string.gmatch(noted or '', '[^,]+') do
  notes[#notes + 1] = note
  if string.match(note, '^([^:]+)%-%d+:.*:%-$') == task then open[#open + 1] = #notes end
end
if #open == 0 then return {'OK', 0, 0} end
local order = string.match(header, ' order=(%S+)') or 'staleness'
local members = next_in_order(order, completed, cut_of(header, task), #open)

local name, lines = string.match(batch, ':batch:(.*)$'), {}
for i, member in ipairs(members) do
  local gid = gid_of(member)
  notes[open[i]] = string.gsub(notes[open[i]], '%-$', gid)
  lines[i] = manifest_line(groups, gid)
  if not lines[i] then return {'DAMAGED', groups .. gid} end
end
if #members > 0 then
  -- the batch first: a worker may not write it, and is stopped here
  redis.call('RPUSH', batch, unpack(lines))
  for _, member in ipairs(members) do redis.call('HSET', groups .. gid_of(member), 'stage', 'taken', 'batch', name) end
  redis.call('LSET', batch, 0, before .. table.concat(notes, ','))
  redis.call('ZREM', completed, unpack(members))
  for _, counter in ipairs({'taken', 'consumed'}) do redis.call('HINCRBY', progress, counter, #members) end
  log_event(events, 'refilled', 'step', int(step), 'groups', #members)
end
-- "awaits" of the ledger is there while positions of any task are open
if string.find(table.concat(notes, ',') .. ',', ':-,', 1, true) then
  redis.call('HSET', ledger, 'awaits', int(step))
else
  redis.call('HDEL', ledger, 'awaits')
end
redis.call('HSET', progress, 'awaited', #open - #members, 'awaited_step', int(step))
wake(bell_producer, 1)
return {'OK', #members, #open - #members}
