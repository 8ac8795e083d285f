#!lua flags=allow-oom
-- quarantine: replace an unusable group of a taken, uncommitted batch with the next ready one of its task; if there
-- is none, its position stays open (refill.lua). The group becomes a dead letter and counts against its worker: one with
-- too many within the window is barred, and claims nothing until an operator unbars it.
-- KEYS control HASH, ledger HASH, batch LIST, groups prefix, completed ZSET, progress HASH, dead ZSET
-- KEYS dead_letters prefix, worker_records prefix, bell_producer LIST, events STREAM, bad_submissions HASH
-- ARGV nonce     token          of the trainer
-- ARGV step      0..            T
-- ARGV gid       gid
-- ARGV token     token          of the payload in the manifest
-- ARGV reason    text..16384    a JSON string
-- ARGV max_bad   0..1_000_000   bad groups within the window that bar a worker; 0 = this one is not its fault
-- ARGV window_ms 1..86_400_000
-- replies OK revision substitute | FENCED | RECOVERING | COMMITTED committed | NOT_TAKEN
--       | DAMAGED record (it is gone: nothing was done)
-- keeps I1, I5 (the new revision is the record: header and entries change here), I7, I8 (the cut of the header), I11, I13 (gid and token)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
if redis.call('HGET', control, 'recovering') then return {'RECOVERING'} end
local committed = num(redis.call('HGET', ledger, 'committed'))
if step <= committed then return {'COMMITTED', int(committed)} end
local lines = redis.call('LRANGE', batch, 0, -1)
local header, place = lines[1] or '', nil
for i = 2, #lines do
  if string.find(lines[i], gid .. ' ' .. token .. ' ', 1, true) == 1 then place = i - 1 end
end
local revision = num(string.match(header, ' revision=(%d+)'))
if not place then
  local _, found = string.find(header, gid .. ':' .. token .. ':', 1, true)
  if found then return {'OK', revision, string.match(header, '^[^,]+', found + 1)} end
  return {'NOT_TAKEN'}
end
local cut = cut_of(header, string.match(gid, '^(.*)%-%d+$'))
local order = string.match(header, ' order=(%S+)') or 'staleness'
local found = next_in_order(order, completed, cut, 1)
local member, held = found[1], redis.call('HMGET', groups .. gid, 'task', 'owner', 'batch')
local task, owner = held[1], held[2] or ''
-- read first: a wrong type stops the script before it writes
local is_known = redis.call('HLEN', worker_records .. owner) > 0

local substitute = member and string.match(member, ':(.*)$') or '-'
local line = member and manifest_line(groups, substitute)
if member and not line then return {'DAMAGED', groups .. substitute} end
if member then
  redis.call('LSET', batch, place, line)
  redis.call('ZREM', completed, member)
  redis.call('HSET', groups .. substitute, 'stage', 'taken', 'batch', held[3])
else
  redis.call('LREM', batch, 1, lines[place + 1])
  -- the position is open: a trainer that waits for another group asks for it (refill.lua)
  for _, counter in ipairs({'taken', 'consumed'}) do redis.call('HINCRBY', progress, counter, -1) end
end
local note = gid .. ':' .. token .. ':' .. substitute
if revision == 0 then
  header = header .. ' revision=1 quarantined=' .. note
else
  header = string.gsub(header, ' revision=%d+', ' revision=' .. int(revision + 1)) .. ',' .. note
end
redis.call('LSET', batch, 0, header)

redis.call('HDEL', groups .. gid, 'batch')
to_dead_letter({groups = groups, dead = dead, dead_letters = dead_letters, progress = progress}, gid,
  letter_of(reason, owner, step))
redis.call('HINCRBY', progress, 'quarantined', 1)
if is_known then redis.call('HINCRBY', worker_records .. owner, 'quarantined', 1) end
if owner ~= '' and max_bad > 0 then
  local now = now_ms()
  local since, bad, barred_ms = string.match(redis.call('HGET', bad_submissions, owner) or '', '^(%d+) (%d+) (%d+)$')
  if not since or (barred_ms == '0' and now - num(since) > window_ms) then since, bad, barred_ms = int(now), 0, '0' end
  bad = num(bad) + 1
  if barred_ms == '0' and bad >= max_bad then
    barred_ms = int(now)
    log_event(events, 'worker_barred', 'worker', owner, 'groups', bad)
  end
  redis.call('HSET', bad_submissions, owner, since .. ' ' .. int(bad) .. ' ' .. barred_ms)
end
wake(bell_producer, 1)
log_event(events, 'quarantined', 'gid', gid, 'step', int(step), 'substitute', substitute, 'worker', owner)
return {'OK', revision + 1, substitute}
