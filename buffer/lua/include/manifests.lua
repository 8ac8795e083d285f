-- manifests: manifest_line, the entry of a group in a manifest.

-- The line of a group: "gid token chunks size crc samples version", '-' for a missing field.
local function manifest_line(groups, gid)
  local record = redis.call('HMGET', groups .. gid, 'payload', 'chunks', 'size', 'crc', 'samples', 'version')
  for k = 1, 6 do if not record[k] or record[k] == '' then record[k] = '-' end end
  return gid .. ' ' .. table.concat(record, ' ')
end
