-- manifests: manifest_line, the entry of a group in a manifest; cut_of, the oldest version in it.

-- The line of a group: "gid token chunks size crc samples version", '-' for a missing field.
local function manifest_line(groups, gid)
  local record = redis.call('HMGET', groups .. gid, 'payload', 'chunks', 'size', 'crc', 'samples', 'version')
  for k = 1, 6 do if not record[k] or record[k] == '' then record[k] = '-' end end
  return gid .. ' ' .. table.concat(record, ' ')
end

-- The oldest version of a task that a batch may hold, as take_batch noted it in the header.
local function cut_of(header, task)
  for name, cut in string.gmatch(string.match(header, ' cut=(%S+)') or '', '([^,=]+)=([^,]+)') do
    if name == task then return cut end
  end
end
