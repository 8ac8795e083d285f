-- receipts: take_receipt, for a control epoch that a worker has carried out (I10).
-- include: bells, numbers

-- I10: a worker says that it has carried out a control epoch. It counts for the newest one, and where nothing may be held
-- only once nothing is.
local function take_receipt(worker, holds, bell, epoch, mode, ack)
  if ack ~= num(epoch) then return end
  local must_be_empty = mode == 'abort' or mode == 'drain' or mode == 'finish'
  if must_be_empty and redis.call('SCARD', holds) > 0 then return end
  -- who waits looks at all receipts whenever it is rung for
  if num(redis.call('HGET', worker, 'ack')) < ack and redis.call('LLEN', bell) == 0 then ring(bell, 1) end
  redis.call('HSET', worker, 'ack', int(ack))
end
