-- receipts: take_receipt, for a control epoch that a worker has carried out (I10).
-- include: numbers, wake_ups

-- I10: a worker, whose last receipt is for `acked`, reports that it has carried out a control epoch. The receipt counts if
-- that is the newest one, and, in modes in which nothing may be held, once the worker holds nothing.
local function take_receipt(worker, acked, held, bell, epoch, mode, ack)
  if ack ~= num(epoch) then return end
  local must_be_empty = mode == 'abort' or mode == 'drain' or mode == 'finish'
  if ack == acked or (must_be_empty and held > 0) then return end
  -- one wake-up is enough: the waiting process polls all receipts
  if acked < ack and redis.call('LLEN', bell) == 0 then wake(bell, 1) end
  redis.call('HSET', worker, 'ack', int(ack))
end
