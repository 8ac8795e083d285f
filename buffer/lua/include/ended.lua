-- ended: ended_place, where a draw without a record has ended.

-- Return archived, filtered or dropped; nil if the draw has not ended.
local function ended_place(bitmaps, draw)
  for _, place in ipairs({'archived', 'filtered', 'dropped'}) do
    if redis.call('GETBIT', bitmaps[place], draw) == 1 then return place end
  end
end
