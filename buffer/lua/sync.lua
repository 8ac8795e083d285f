#!lua flags=allow-oom
-- sync: a write, so that the WAIT or WAITAOF behind it on the same connection covers all that was written before it,
-- by whichever connection: a repeated call changes nothing, and nothing would be waited for.
-- include: clock, numbers
-- KEYS clock HASH
-- replies OK
-- keeps I6 (an answer that was to be durable is), I13

redis.call('HSET', clock, 'synced_ms', int(now_ms()))
return {'OK'}
