-- order_index: put_in_order, which adds a completed group to the index of the run's order.
-- include: numbers

-- Add a completed group at `place`: arrival, bucket:<n> (buckets take turns) or a score; '' = no index.
local function put_in_order(order_index, progress, place, arrival, gid)
  if place == '' then return end
  if place == 'arrival' then
    place = arrival
  elseif string.match(place, '^bucket:%d+$') then
    local turns = place
    local rounds = redis.call('HMGET', progress, turns, 'order_round')
    place = int(math.max(num(rounds[1]), num(rounds[2])) + 1)
    redis.call('HSET', progress, turns, place)
  end
  redis.call('ZADD', order_index, place, arrival .. ':' .. gid)
end
