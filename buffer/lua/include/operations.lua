-- operations: begin_operation, which records the nonce of a call, unless it is recorded already.

-- Return whether the operation is new. The newest are kept: a call that arrives again behind later ones does not undo them.
local function begin_operation(key, field, operation)
  local done = redis.call('HGET', key, field) or ''
  if string.find(done, operation, 1, true) then return false end
  redis.call('HSET', key, field, string.sub(operation .. ' ' .. done, 1, 500))
  return true
end
