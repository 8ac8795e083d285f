#!lua flags=allow-oom
-- release: take a group back from its worker, without a result.
-- KEYS leases ZSET, leased HASH, groups prefix, progress HASH, queues prefix, aborted ZSET, lineages LIST
-- KEYS dead ZSET, dead_letters prefix, bell_workers LIST, bell_producer LIST, events STREAM, expired ZSET
-- KEYS age_index ZSET, ledger HASH, dropped STRING, skipped STRING, skips LIST, garbage SET, bytes HASH
-- KEYS workers ZSET, bell_trainer LIST, worker_tokens HASH
-- ARGV gid       gid
-- ARGV token     token                         of the claim
-- ARGV kind      handback|aborted|expired|skipped|failed|lost  waits again | to the pool of aborted groups | the same,
--                                            unless it is too old for the next train step: then its tokens are
--                                            discarded | ends, since its prompt makes no sense | a try is used up | the
--                                            same, but perhaps not by the group's fault
-- ARGV max_tries 1..1_000_000
-- ARGV reason    text..16384                   JSON, kept as the letter of a dead or skipped group
-- ARGV token_lead ''|0..                        steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV tail_batch_max_tries ''|1..                        interruptions after which a group without tokens waits for the tail batch,
--                                            in the pool of expired groups; '' = none does
-- ARGV threshold ''|0..                        stale threshold in steps; '' = groups of this task do not age
-- ARGV retryable 0|1                           1 = an expired group starts again from its prompt; 0 = it is dropped
-- ARGV discarded 0..1_000_000_000_000          tokens that an expired group has
-- ARGV unmade    0..1_000_000_000_000          tokens that it could still have generated, at most
-- ARGV task      name
-- ARGV worker    name
-- ARGV lease_ms  1..86_400_000
-- ARGV message   text..1000                    the reason in one line, for screens
-- ARGV cause     ''|text..640                 what failures of one cause have in common, "KeyError at judge.py:12"
-- ARGV patience  ''|1..                        failures of the task in a row after which it is stopped; '' = no limit
-- ARGV first     ''|1..                        the same while no try of the task has succeeded
-- ARGV sampled   ''|sampled                   made tokens: see shared/tokens.lua
-- ARGV made_by   ''|ages                       of an expired group, as in submit; '' = as its record says
-- ARGV most_skipped 0..64                    of the newest 64 groups of the task; beyond it, it is stopped
-- replies OK place | FENCED
-- keeps I1, I2, I8, I11 (a clean release gives the try back; a task of which every try fails stops), I13 (token)

local record = groups .. gid
local held = fields_of(record, 'token', 'stage', 'lane', 'payload', 'version', 'released', 'lineage', 'last',
  'last_lineage', 'chunks', 'size', 'prompt', 'counted')
if held.released == token then return {'OK', held.stage} end
local draw = tonumber(string.match(gid, '%d+$'))
if not held.stage then
  if kind == 'expired' and redis.call('GETBIT', dropped, draw) == 1 then return {'OK', 'dropped'} end
  if kind == 'skipped' and redis.call('GETBIT', skipped, draw) == 1 then return {'OK', 'skipped'} end
end
if held.token ~= token or held.stage ~= 'running' then return {'FENCED'} end
local lane = lane_again(held.lane)
local jobs, version, last = queues .. task .. ':' .. lane, held.version or '', held.last or ''
redis.call('XLEN', jobs)
local is_clean, is_expiring, cut = kind ~= 'failed' and kind ~= 'lost', false, 0
if kind == 'expired' then
  -- the worker may have counted a request as begun that waited in its engine: the tokens decide
  local oldest = age_of(lineages, made_by)
  if oldest == '' and version ~= '' then oldest = living_version(lineages, held.lineage, version) end
  cut = next_step(ledger) - (threshold or 0)
  is_expiring = threshold and oldest ~= '' and tonumber(oldest) < cut
end

let_go(leases, leased, worker, {gid}, {token})
redis.call('HINCRBY', progress, 'running', -1)
redis.call('HSET', record, 'released', token)
if is_clean then redis.call('HINCRBY', record, 'tries', -1) end
local place = 'waiting'
if not is_clean then
  if kind == 'failed' then
    local failures = note_failure(progress, workers, worker, lease_ms, message, cause, patience, first)
    local why = int(failures or 0) .. ' tries in a row failed: ' .. message
    if failures then stop_task(progress, task, why, bell_trainer, events) end
  end
  place = retry_or_dead_letter({groups = groups, jobs = jobs, lane = lane, dead = dead,
    dead_letters = dead_letters, progress = progress, age_index = age_index}, gid, max_tries, reason)
elseif kind == 'skipped' then
  place = 'skipped'
  redis.call('ZREM', age_index, gid)
  end_tokens(progress, 'skipped', record)
  end_group(groups, garbage, bytes, gid, held)
  skip_draw({skipped = skipped, skips = skips, progress = progress, bell_trainer = bell_trainer, events = events}, task,
    draw, reason, most_skipped)
elseif kind == 'handback' then
  to_waiting(jobs, record, gid, lane, held.payload)
  keep_age(age_index, gid, held.payload, version)
else
  redis.call('ZREM', age_index, gid)
  local aborts = redis.call('HINCRBY', record, 'aborts', 1)
  if is_expiring then
    redis.call('HINCRBY', progress, 'ended_early', 1)
    redis.call('HINCRBY', progress, 'discarded_tokens', int(discarded))
    redis.call('HINCRBY', progress, 'unmade_tokens', int(unmade))
    place = expire_groups({groups = groups, progress = progress, expired = expired, dropped = dropped, garbage = garbage,
      bytes = bytes}, {{gid = gid, held = redis.call('HMGET', record, unpack(EXPIRING))}}, retryable, cut)
  else
    place = 'pool'
    local arrival = next_arrival(progress)
    -- a trainer may have forked while the group was in no pool (I8)
    if version ~= '' then version = living_version(lineages, held.lineage, version) end
    if last ~= '' then last = living_version(lineages, held.last_lineage, last) end
    local is_tail = tail_batch_max_tries and aborts >= tail_batch_max_tries and held.payload == 'init'
    redis.call('HSET', record, 'stage', 'pool', 'status', is_tail and 'expired' or 'aborted', 'token', '',
      'arrival', arrival, 'version', version)
    redis.call('ZADD', is_tail and expired or aborted, pool_score(version, last, token_lead), arrival .. ':' .. gid)
  end
end
local new, _, _, total, closed = claimed_tokens(sampled, has_turns_of(token, held.payload) and held.counted)
local row = (kind == 'failed' or kind == 'lost') and 'failed' or is_expiring and 'expired' or 'resampled'
local is_end = place == 'dropped' or place == 'dead' or place == 'skipped'
add_tokens(progress, is_end and place or row, new)
if sampled ~= '' then hear(worker_tokens, progress, task, total, closed, new) end
wake(place == 'waiting' and bell_workers or bell_producer, 1)
log_event(events, 'released', 'gid', gid, 'worker', worker, 'kind', kind == 'expired' and 'aborted' or kind, 'place', place)
return {'OK', place}
