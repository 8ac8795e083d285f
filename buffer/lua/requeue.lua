#!lua
-- requeue: return a dead group, or one of a pool, to the queue by hand, with all its tries.
-- It starts from its prompt, since its tokens may be the cause of its failure. An aborted group keeps its tokens.
-- KEYS record HASH, progress HASH, queues prefix, completed ZSET, aborted ZSET, expired ZSET, dead ZSET
-- KEYS dead_letters prefix, archived STRING, filtered STRING, dropped STRING, garbage SET, bell_workers LIST
-- KEYS events STREAM, bytes HASH, age_index ZSET
-- ARGV gid       gid
-- ARGV draw      0..69_999_999
-- ARGV operation token          nonce of this call
-- ARGV task      name
-- ARGV lane      resume|eval    in which it waits
-- replies OK place_before | RUNNING owner | TAKEN batch | ENDED place | UNKNOWN
-- keeps I1, I11 (a dead letter may live again), I12, I13 (operation)

local held = redis.call('HMGET', record, 'stage', 'status', 'owner', 'batch', 'payload', 'chunks', 'arrival', 'requeued',
  'size', 'prompt', 'version')
if not held[1] then
  local place = ended_place({archived = archived, filtered = filtered, dropped = dropped}, draw)
  if place then return {'ENDED', place} end
  return {'UNKNOWN'}
end
if held[1] == 'waiting' or held[8] == operation then return {'OK', held[1]} end
if held[1] == 'running' then return {'RUNNING', held[3]} end
if held[1] == 'taken' then return {'TAKEN', held[4]} end

local jobs = queues .. task .. ':' .. lane
redis.call('XLEN', jobs)
local before = remove_dead_or_pooled({record = record, progress = progress, completed = completed, aborted = aborted,
  expired = expired, dead = dead, dead_letters = dead_letters}, gid, held[1], held[2], held[7])
local payload, version = held[5], held[11]
if before ~= 'aborted' then
  if payload ~= 'init' then
    redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[6])
    count_bytes(bytes, 0, num(held[9]))
  end
  payload = 'init'
  redis.call('HSET', record, 'status', 'init', 'payload', 'init', 'chunks', 1, 'size', num(held[10]), 'crc', '',
    'version', '', 'lineage', '', 'tokens', 0)
end
redis.call('HSET', record, 'tries', 0, 'requeued', operation, 'released', '')
to_waiting(jobs, record, gid, lane, payload)
keep_age(age_index, gid, payload, version)
wake(bell_workers, 1)
log_event(events, 'requeued', 'gid', gid, 'from', before)
return {'OK', before}
