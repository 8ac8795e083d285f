#!lua flags=no-writes
-- silent: list live workers that have not carried out the newest control epoch, or a given one, at one instant.
-- KEYS control HASH*, workers ZSET, worker_records prefix
-- ARGV epoch    ''|0..         '' = the newest
-- ARGV lease_ms 1..86_400_000  silence after which a worker is not waited for
-- ARGV limit    1..10000       largest number of workers to scan
-- replies OK, then their ids
-- keeps I10 (a receipt of every live worker)

epoch = epoch or num(redis.call('HGET', control, 'epoch'))
local reply = {'OK'}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', workers, int(now_ms() - lease_ms), '+inf', 'LIMIT', 0, limit)) do
  if num(redis.call('HGET', worker_records .. id, 'ack')) < epoch then reply[#reply + 1] = id end
end
return reply
