#!lua flags=allow-oom
-- sync: write something, so that a WAIT or WAITAOF behind it covers all earlier writes of all connections.
-- A repeated call may have written nothing itself, and WAIT would then not wait.
-- KEYS clock HASH
-- replies OK
-- keeps I6 (a durable answer is durable), I13

redis.call('HSET', clock, 'synced_ms', int(now_ms()))
return {'OK'}
