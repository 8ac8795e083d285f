#!lua flags=allow-oom
-- release: a worker gives a group back without a result.
-- include: bells, events, numbers, retries, staleness, waiting
-- KEYS[1] leases       ZSET
-- KEYS[2] holds        SET      gids that the worker holds
-- KEYS[3] groups       prefix of the group records (HASH)
-- KEYS[4] progress     HASH     of the task
-- KEYS[5] jobs_resume  STREAM
-- KEYS[6] jobs_eval    STREAM
-- KEYS[7] aborted      ZSET     pool of the task
-- KEYS[8] lineages     LIST
-- KEYS[9] dead         ZSET
-- KEYS[10] dead_letters prefix of the reasons (STRING)
-- KEYS[11] bell_workers   LIST
-- KEYS[12] bell_producer  LIST
-- KEYS[13] events      STREAM
-- KEYS[14] expired     ZSET     pool of the task
-- ARGV[1] gid       gid
-- ARGV[2] token     token                    of the claim
-- ARGV[3] kind      handback|aborted|failed|lost  waits again | to the pool of aborted groups | a try is used up |
--                                            the same, but nobody knows whether by the group's fault
-- ARGV[4] max_tries 1..1_000_000
-- ARGV[5] reason    text..16384              JSON, kept as the dead letter
-- ARGV[6] lag       ''|0..                   steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV[7] tail      ''|1..                   interruptions after which a group without tokens waits for the tail batch,
--                                            in the pool of those that start from their prompt again; '' = none does
-- replies OK place | FENCED
-- keeps I1, I2, I8, I11 (a clean release gives the try back), I13 (token)
local leases, holds, groups, progress = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local jobs_resume, jobs_eval, aborted, lineages = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local dead, dead_letters, bell_workers, bell_producer, events = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local gid, token, kind, max_tries, reason = ARGV[1], ARGV[2], ARGV[3], num(ARGV[4]), ARGV[5]
local lag, expired, tail = ARGV[6], KEYS[14], ARGV[7]

local record = groups .. gid
local held = redis.call('HMGET', record, 'token', 'stage', 'lane', 'payload', 'version', 'released', 'lineage',
  'last', 'last_lineage')
if held[6] == token then return {'OK', held[2]} end
if held[1] ~= token or held[2] ~= 'running' then return {'FENCED'} end

redis.call('ZREM', leases, gid)
redis.call('SREM', holds, gid)
redis.call('HINCRBY', progress, 'running', -1)
redis.call('HSET', record, 'released', token)
local place
if kind == 'failed' or kind == 'lost' then
  if kind == 'failed' then
    redis.call('HINCRBY', progress, 'failed', 1)
    redis.call('HINCRBY', progress, 'failures_in_row', 1)
  end
  place = retry_or_bury({groups = groups, jobs_resume = jobs_resume, jobs_eval = jobs_eval, dead = dead,
    dead_letters = dead_letters, progress = progress}, gid, max_tries, reason)
else
  redis.call('HINCRBY', record, 'tries', -1)
  if kind == 'aborted' then
    place = 'pool'
    local aborts = redis.call('HINCRBY', record, 'aborts', 1)
    local arrival = string.format('%010d', redis.call('HINCRBY', progress, 'arrivals', 1))
    local version, last = held[5] or '', held[8] or ''
    -- a trainer may have forked while the group was away from the pools (I8)
    if version ~= '' then version = living_version(lineages, held[7], version) end
    if last ~= '' then last = living_version(lineages, held[9], last) end
    local is_tail = tail ~= '' and aborts >= tonumber(tail) and held[4] == 'init'
    redis.call('HSET', record, 'stage', 'pool', 'status', is_tail and 'expired' or 'aborted', 'token', '',
      'arrival', arrival, 'version', version)
    redis.call('ZADD', is_tail and expired or aborted, pool_score(version, last, lag), arrival .. ':' .. gid)
  else
    place = 'waiting'
    local lane, jobs = 'resume', jobs_resume
    if held[3] == 'eval' then lane, jobs = 'eval', jobs_eval end
    to_waiting(jobs, record, gid, lane, held[4])
  end
end
ring(place == 'waiting' and bell_workers or bell_producer, 1)
log_event(events, 'released', 'gid', gid, 'kind', kind, 'place', place)
return {'OK', place}
