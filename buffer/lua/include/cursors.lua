-- cursors: next_draw and move_cursor, the next draw of a task (I3).
-- include: numbers

-- I3: the next draw of a task. A run of an earlier version has it in its account only, where `move_cursor` leaves a copy.
local function next_draw(cursors, progress, task)
  return num(redis.call('HGET', cursors, task) or redis.call('HGET', progress, 'cursor'))
end

local function move_cursor(cursors, progress, task, cursor)
  redis.call('HSET', cursors, task, int(cursor))
  redis.call('HSET', progress, 'cursor', int(cursor))
end
