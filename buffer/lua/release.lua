#!lua flags=allow-oom
-- release: take a group back from its worker, without a result.
-- include: bells, brakes, events, numbers, retries, staleness, waiting
-- KEYS leases        ZSET
-- KEYS holds         SET     gids that the worker holds
-- KEYS groups        prefix  of the group records (HASH)
-- KEYS progress      HASH    of the task
-- KEYS jobs_resume   STREAM
-- KEYS jobs_eval     STREAM
-- KEYS aborted       ZSET    pool of the task
-- KEYS lineages      LIST
-- KEYS dead          ZSET
-- KEYS dead_letters  prefix  of the reasons (STRING)
-- KEYS bell_workers  LIST
-- KEYS bell_producer LIST
-- KEYS events        STREAM
-- KEYS expired       ZSET    pool of the task
-- KEYS workers       ZSET
-- KEYS bell_trainer  LIST
-- ARGV gid       gid
-- ARGV token     token                         of the claim
-- ARGV kind      handback|aborted|failed|lost  waits again | to the pool of aborted groups | a try is used up |
--                                            the same, but perhaps not by the group's fault
-- ARGV max_tries 1..1_000_000
-- ARGV reason    text..16384                   JSON, kept as the dead letter
-- ARGV lag       ''|0..                        steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV tail      ''|1..                        interruptions after which a group without tokens waits for the tail batch,
--                                            in the pool of expired groups; '' = none does
-- ARGV task      name
-- ARGV worker    name
-- ARGV lease_ms  1..86_400_000
-- ARGV message   text..1000                    the reason in one line, for screens
-- ARGV patience  ''|1..                        failures of the task in a row after which it is stopped; '' = no limit
-- ARGV first     ''|1..                        the same while no try of the task has succeeded
-- replies OK place | FENCED
-- keeps I1, I2, I8, I11 (a clean release gives the try back; a task of which every try fails stops), I13 (token)

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
    local failures = note_failure(progress, workers, worker, lease_ms, message, patience, first)
    if failures and redis.call('HEXISTS', progress, 'stopped') == 0 then
      stop_task(progress, task, int(failures) .. ' tries in a row failed: ' .. message, bell_trainer, events)
    end
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
    -- a trainer may have forked while the group was in no pool (I8)
    if version ~= '' then version = living_version(lineages, held[7], version) end
    if last ~= '' then last = living_version(lineages, held[9], last) end
    local is_tail = tail and aborts >= tail and held[4] == 'init'
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
