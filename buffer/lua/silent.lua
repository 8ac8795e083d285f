#!lua flags=no-writes
-- silent: live workers that have not carried out the newest control epoch, or a given one, at one instant.
-- include: clock, numbers
-- KEYS[1] control   HASH*
-- KEYS[2] workers   ZSET
-- KEYS[3] worker_records prefix of the workers' records (HASH)
-- ARGV[1] epoch     ''|0..          '' = the newest
-- ARGV[2] lease_ms  1..86_400_000   who was silent for so long is not waited for
-- ARGV[3] limit     1..10000        workers looked at
-- replies OK, then their ids
-- keeps I10 (a receipt of every live worker)
local epoch = num(ARGV[1] == '' and redis.call('HGET', KEYS[1], 'epoch') or ARGV[1])
local reply = {'OK'}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], int(now_ms() - num(ARGV[2])), '+inf', 'LIMIT', 0, num(ARGV[3]))) do
  if num(redis.call('HGET', KEYS[3] .. id, 'ack')) < epoch then reply[#reply + 1] = id end
end
return reply
