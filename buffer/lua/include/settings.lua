-- settings: put_settings, which writes fields of meta, and the same of its copy.

-- Each key has its own: a field that was damaged in one is not carried over to the other.
local function put_settings(meta, meta_copy, ...)
  redis.call('HSET', meta, ...)
  redis.call('HSET', meta_copy, ...)
end
