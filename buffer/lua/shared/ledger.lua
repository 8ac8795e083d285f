-- ledger: the steps of the trainer and the manifests of its batches.

-- Return the step that is taken next, or the one whose batch the trainer waits to complete (refill.lua).
local function next_step(ledger)
  local steps = redis.call('HMGET', ledger, 'taken', 'awaits')
  local taken, awaits = num(steps[1]), num(steps[2])
  return awaits > 0 and math.min(awaits, taken + 1) or taken + 1
end

-- The line of a group: "gid token chunks size crc samples version", '-' for a missing field; nil where its record is gone.
local function manifest_line(groups, gid)
  local payload, chunks, size, crc, samples, version =
    unpack(redis.call('HMGET', groups .. gid, 'payload', 'chunks', 'size', 'crc', 'samples', 'version'))
  if not (payload and chunks and size) then return end
  if crc == '' then crc = '-' end
  if version == '' then version = '-' end
  -- a table for each line would take a tenth of a take's time
  return gid .. ' ' .. payload .. ' ' .. chunks .. ' ' .. size .. ' ' .. (crc or '-') .. ' ' .. (samples or '-') .. ' ' .. (version or '-')
end

-- The oldest version of a task that a batch may hold, as take_batch noted it in the header.
local function cut_of(header, task)
  for name, cut in string.gmatch(string.match(header, ' cut=(%S+)') or '', '([^,=]+)=([^,]+)') do
    if name == task then return cut end
  end
end
