-- cursors: next_draw and move_cursor, the next draw of a task (I3).
-- include: numbers

local function next_draw(cursors, task) return num(redis.call('HGET', cursors, task)) end

-- The account gets a copy for people; no script reads it.
local function move_cursor(cursors, progress, task, cursor)
  redis.call('HSET', cursors, task, int(cursor))
  redis.call('HSET', progress, 'cursor', int(cursor))
end
