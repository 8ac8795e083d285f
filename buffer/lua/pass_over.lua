#!lua flags=allow-oom
-- pass_over: after a loss, move the cursor past draws that are already running or have ended. One bounded slice.
-- KEYS control HASH, progress HASH, groups prefix, ends prefix
-- KEYS cursors HASH
-- ARGV nonce token   of the producer
-- ARGV task  name
-- ARGV limit 1..512  largest number of draws
-- replies OK cursor left (1 = the next draw may exist, too) | FENCED
-- keeps I1 (`reentered` decreases as the cursor increases), I3 (skips nothing that must still be drawn), I7, I13 (absolute)

if redis.call('HGET', control, 'producer') ~= nonce then return {'FENCED'} end
local cursor, reentered = next_draw(cursors, task), num(redis.call('HGET', progress, 'reentered'))
local stop = cursor + math.min(limit, reentered)
local draw = cursor
while draw < stop do
  local ended = ended_stage(ends .. task .. ':', draw)
  if not ended and redis.call('EXISTS', groups .. string.format('%s-%010d', task, draw)) == 0 then break end
  draw = draw + 1
end
if draw > cursor then
  move_cursor(cursors, progress, task, draw)
  redis.call('HSET', progress, 'reentered', int(reentered - (draw - cursor)))
end
return {'OK', int(draw), (draw == stop and stop < cursor + reentered) and 1 or 0}
