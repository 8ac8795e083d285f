#!lua
-- requeue: by hand, let a dead group, or one of a pool, wait again with all its tries.
-- It starts from its prompt, since what it had may be what killed it; an aborted group keeps its tokens.
-- include: bells, byte_count, ended, events, leave_by_hand, numbers, waiting
-- KEYS[1] group        HASH     record of the group
-- KEYS[2] progress     HASH     of the task
-- KEYS[3] jobs         STREAM   the lane it waits in
-- KEYS[4] completed    ZSET     pool of the task
-- KEYS[5] aborted      ZSET     pool of the task
-- KEYS[6] expired      ZSET     pool of the task
-- KEYS[7] dead         ZSET
-- KEYS[8] dead_letters prefix of the reasons (STRING)
-- KEYS[9] archived     STRING   bitmap
-- KEYS[10] filtered    STRING   bitmap
-- KEYS[11] dropped     STRING   bitmap
-- KEYS[12] garbage     SET
-- KEYS[13] bell        LIST     of the workers
-- KEYS[14] events      STREAM
-- KEYS[15] order       ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[16] bytes       HASH
-- ARGV[1] gid       gid
-- ARGV[2] draw      0..69_999_999
-- ARGV[3] operation token          nonce of this call
-- ARGV[4] lane      resume|eval
-- replies OK place_before | RUNNING owner | TAKEN batch | ENDED place | UNKNOWN
-- keeps I1, I11 (a dead letter may live again), I12, I13 (operation)
local group, progress, jobs, completed, aborted, expired = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local dead, dead_letters, archived, filtered, dropped = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local garbage, bell, events, order, bytes = KEYS[12], KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local gid, draw, operation, lane = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local held = redis.call('HMGET', group, 'stage', 'status', 'owner', 'batch', 'payload', 'chunks', 'arrival', 'requeued',
  'size', 'prompt')
if not held[1] then
  local place = ended_place({archived = archived, filtered = filtered, dropped = dropped}, draw)
  if place then return {'ENDED', place} end
  return {'UNKNOWN'}
end
if held[1] == 'waiting' or held[8] == operation then return {'OK', held[1]} end
if held[1] == 'running' or held[1] == 'judging' then return {'RUNNING', held[3]} end
if held[1] == 'taken' then return {'TAKEN', held[4]} end

local before = leave_by_hand({group = group, progress = progress, completed = completed, aborted = aborted,
  expired = expired, order = order, dead = dead, dead_letters = dead_letters}, gid, held[1], held[2], held[7])
local payload = held[5]
if before ~= 'aborted' then
  if payload ~= 'init' then
    redis.call('SADD', garbage, gid .. ' ' .. payload .. ' ' .. held[6])
    count_bytes(bytes, 0, num(held[9]))
  end
  payload = 'init'
  redis.call('HSET', group, 'status', 'init', 'payload', 'init', 'chunks', 1, 'size', num(held[10]), 'crc', '',
    'version', '', 'lineage', '', 'tokens', 0)
end
redis.call('HSET', group, 'tries', 0, 'requeued', operation)
to_waiting(jobs, group, gid, lane, payload)
ring(bell, 1)
log_event(events, 'requeued', 'gid', gid, 'from', before)
return {'OK', before}
