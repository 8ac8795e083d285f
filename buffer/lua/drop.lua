#!lua flags=allow-oom
-- drop: by hand, end a group that waits, is in a pool, or is dead; or one that runs, if its worker is named.
-- include: bells, byte_count, ended, events, leave, numbers
-- KEYS[1] group        HASH     record of the group
-- KEYS[2] progress     HASH     of the task
-- KEYS[3] jobs_eval    STREAM
-- KEYS[4] jobs_resume  STREAM
-- KEYS[5] jobs_fresh   STREAM
-- KEYS[6] completed    ZSET     pool of the task
-- KEYS[7] aborted      ZSET     pool of the task
-- KEYS[8] expired      ZSET     pool of the task
-- KEYS[9] leases       ZSET
-- KEYS[10] holders     prefix of the workers' holds (SET)
-- KEYS[11] dead        ZSET
-- KEYS[12] dead_letters prefix of the reasons (STRING)
-- KEYS[13] archived    STRING   bitmap
-- KEYS[14] filtered    STRING   bitmap
-- KEYS[15] dropped     STRING   bitmap
-- KEYS[16] garbage     SET
-- KEYS[17] bell        LIST     of the producer
-- KEYS[18] events      STREAM
-- KEYS[19] order       ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[20] bytes       HASH
-- ARGV[1] gid    gid
-- ARGV[2] draw   0..69_999_999
-- ARGV[3] revoke ''|name        worker whose lease on the group is revoked in this step; '' = a running group is refused
-- replies OK place_before | RUNNING owner | TAKEN batch | ENDED place | UNKNOWN
-- keeps I1, I2 (a revoked token dies in the same step), I12 (frees), I13 (a dropped group is dropped)
local group, progress, jobs_eval, jobs_resume, jobs_fresh = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local completed, aborted, expired, leases, holders = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local dead, dead_letters, archived, filtered, dropped = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local garbage, bell, events, order, bytes = KEYS[16], KEYS[17], KEYS[18], KEYS[19], KEYS[20]
local gid, draw, revoke = ARGV[1], ARGV[2], ARGV[3]

local held = held_fields(group)
if not held then
  local place = ended_place({archived = archived, filtered = filtered, dropped = dropped}, draw)
  if place == 'dropped' then return {'OK', place} end
  if place then return {'ENDED', place} end
  return {'UNKNOWN'}
end
local runs = held.stage == 'running' or held.stage == 'judging'
if runs and (revoke == '' or held.owner ~= revoke) then return {'RUNNING', held.owner} end
if held.stage == 'taken' then return {'TAKEN', held.batch} end
if runs then redis.call('SCARD', holders .. held.owner) end

local before = leave({progress = progress, jobs = {eval = jobs_eval, resume = jobs_resume, fresh = jobs_fresh},
  completed = completed, aborted = aborted, expired = expired, order = order, leases = leases, holders = holders,
  dead = dead, dead_letters = dead_letters}, gid, held)
redis.call('SADD', garbage, gid .. ' init 1')
if held.payload ~= 'init' then redis.call('SADD', garbage, gid .. ' ' .. held.payload .. ' ' .. held.chunks) end
count_bytes(bytes, 0, num(held.prompt) + (held.payload ~= 'init' and num(held.size) or 0))
redis.call('SETBIT', dropped, draw, 1)
redis.call('HINCRBY', progress, 'dropped', 1)
redis.call('UNLINK', group)
ring(bell, 1)
log_event(events, 'dropped', 'gid', gid, 'from', before)
return {'OK', before}
