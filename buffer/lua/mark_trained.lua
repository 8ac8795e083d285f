#!lua flags=allow-oom
-- mark_trained: after a loss, end draws again, by value, that ended according to the trainer's checkpoint but not to the
-- server, wherever they reappeared. Or, for a trainer that goes back below what is freed, let them be drawn again.
-- One bounded slice of one task.
-- KEYS control HASH, groups prefix, queues prefix, pools prefix, accounts prefix, ages prefix, ends prefix
-- KEYS leases ZSET, leased_by prefix, dead ZSET, dead_letters prefix, garbage SET, events STREAM, bytes HASH
-- KEYS cursors HASH
-- ARGV nonce token  of the trainer
-- ARGV task  name
-- ARGV first 0..    draw of the first imported group of every task
-- ARGV seen  0..    cursor of the checkpoint
-- ARGV lost  0..    draws before it that the server forgot and that must be drawn again; counted once
-- ARGV draw, stage  0..67_108_863, archived|dropped|skipped|again x0..128  by rising draw; again = drawn again, if archived
-- replies OK changed | FENCED | TAKEN gid (dissolve its batch first) | DRAW next (an imported draw would leave a hole)
-- keeps I1 (`enqueued` counts all draws; those beyond the cursor are `reentered` of it), I2, I6, I7, I12, I13

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local keys = task_keys({groups = groups, queues = queues, pools = pools, accounts = accounts, ages = ages,
  leases = leases, leased_by = leased_by, dead = dead, dead_letters = dead_letters}, task)
local account, bitmaps = keys.progress, ends .. task .. ':'
for _, stage in ipairs(ENDS) do redis.call('STRLEN', bitmaps .. stage) end
local counts = redis.call('HMGET', account, 'put', 'imported', 'reentered', 'highest_draw', 'lost_to')
local next_added, cursor = first + num(counts[1]) + num(counts[2]), next_draw(cursors, task)
local reentered, highest_draw = num(counts[3]), math.max(cursor, num(counts[4]))

local draws = {}
for _, draw, stage in each_unit do
  local gid = string.format('%s-%010d', task, draw)
  local held, now = held_fields(groups .. gid), ended_stage(bitmaps, draw)
  if held and held.stage == 'taken' then return {'TAKEN', gid} end
  read_place(keys, held)
  if not held and not now and draw >= first then
    if draw ~= next_added then return {'DRAW', int(next_added)} end
    next_added = next_added + 1
  end
  draws[#draws + 1] = {draw = draw, stage = stage, gid = gid, held = held, now = now}
end

local changed, again, moved = 0, 0, {}
local function count(name, by) moved[name] = (moved[name] or 0) + by end
for _, one in ipairs(draws) do
  local draw, stage, held, now = one.draw, one.stage, one.held, one.now
  if stage == 'again' then
    if now == 'archived' then
      redis.call('SETBIT', bitmaps .. 'archived', draw, 0)
      count('archived', -1)
      count('enqueued', -1)
      redis.call('SREM', garbage, one.gid .. ' init 1')
      if draw < cursor then
        -- all others in between stay counted
        reentered, cursor = reentered + cursor - draw - 1, draw
      else
        reentered = reentered - 1
      end
      again = again + 1
    end
  elseif held or now ~= stage then
    if held then
      end_tokens(account, stage == 'archived' and 'trained' or stage, groups .. one.gid)
      remove_from_stage(keys, one.gid, held)
      end_group(groups, garbage, bytes, one.gid, held)
    elseif now then
      redis.call('SETBIT', bitmaps .. now, draw, 0)
      count(now, -1)
    elseif draw >= first then
      count('imported', 1)
    else
      count('enqueued', 1)
      reentered, highest_draw = reentered + 1, math.max(highest_draw, draw + 1)
    end
    redis.call('SETBIT', bitmaps .. stage, draw, 1)
    count(stage, 1)
    changed = changed + 1
  end
end
-- what is archived was taken; after a gap, reset_ledger sets both
moved.consumed = moved.archived
for name, by in pairs(moved) do redis.call('HINCRBY', account, name, by) end
redis.call('HSET', control, 'trainer_seen_ms', int(now_ms()))
if num(counts[5]) >= seen then lost = 0 end
if changed + again + lost > 0 then
  move_cursor(cursors, account, task, cursor)
  redis.call('HSET', account, 'reentered', int(reentered), 'highest_draw', int(highest_draw), 'lost_to', int(math.max(seen, num(counts[5]))))
  redis.call('HINCRBY', account, 'reasserted', changed)
  redis.call('HINCRBY', account, 'regenerated', again + lost)
  log_event(events, 'reasserted', 'task', task, 'groups', changed, 'regenerated', int(again + lost))
end
return {'OK', changed + again}
