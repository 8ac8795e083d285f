-- take_back: found_group and take_back, for groups that a worker held and loses (I1, I2, I11).
-- include: dead_letter, events, leased, numbers, payloads, retries, wake_ups

-- Return a held group with the keys of its task; `under`: the prefixes. All keys are read: a wrong type stops the script
-- here, before it writes anything. A group without its record has no keys (fsck reports it). It has grown if its claim
-- kept turns, and it has more tokens now than at any earlier claim: turns of agents that began again do not count.
local function found_group(under, worker, gid, token)
  local keys
  local held = redis.call('HMGET', under.groups .. gid, 'task', 'token', 'claimed_ms', 'lane', 'payload', 'tokens', 'best')
  if held[1] and held[2] == token then
    keys = retry_keys(held[1], held[4], under.groups, under.queues, under.accounts, under.ages, under.dead, under.dead_letters)
  end
  return {worker = worker, gid = gid, token = token, keys = keys, claimed_ms = num(held[3]),
    has_grown = has_turns_of(token, held[5] or '') and num(held[6]) > num(held[7])}
end

-- Take groups from their workers. A try is used up; if the group has grown, all of them are given back, so that they
-- count claims without progress. Return how many groups wait again, and how many are dead letters now.
local function take_back(under, found, max_tries, reason)
  local waiting, died = 0, 0
  for _, one in ipairs(found) do
    let_go(under.leases, under.leased_by .. one.worker, one.worker, {one.gid}, {one.token})
    if one.keys then
      redis.call('HINCRBY', one.keys.progress, 'running', -1)
      redis.call('HINCRBY', one.keys.progress, 'leases_lost', 1)
      local letter = letter_of('"' .. reason .. '"', one.worker)
      if one.has_grown then redis.call('HSET', under.groups .. one.gid, 'tries', 0) end
      local place = retry_or_dead_letter(one.keys, one.gid, max_tries, letter)
      log_event(under.events, 'reaped', 'gid', one.gid, 'worker', one.worker, 'place', place)
      if place == 'dead' then died = died + 1 else waiting = waiting + 1 end
    end
  end
  if waiting > 0 then wake(under.bell_workers, waiting) end
  -- a dead letter makes room for another group
  if died > 0 then wake(under.bell_producer, 1) end
  return waiting, died
end
