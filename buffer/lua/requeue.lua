#!lua
-- requeue: return a dead group, or one of a pool, to the queue by hand, with all its tries.
-- It starts from its prompt, since its tokens may be the cause of its failure. An aborted group keeps its tokens.
-- KEYS record HASH, progress HASH, queues prefix, completed ZSET, aborted ZSET, expired ZSET, dead ZSET
-- KEYS dead_letters prefix, ends prefix, garbage SET, bell_workers LIST
-- KEYS events STREAM, bytes HASH, age_index ZSET
-- ARGV gid       gid
-- ARGV operation token          nonce of this call
-- ARGV task      name
-- ARGV lane      resume|eval    in which it waits
-- replies OK stage_before | RUNNING owner | TAKEN batch | ENDED stage | UNKNOWN
-- keeps I1, I11 (a dead letter may live again), I12, I13 (operation)

local held = fields_of(record, 'stage', 'status', 'owner', 'batch', 'payload', 'chunks', 'arrival', 'requeued', 'size',
  'prompt', 'version')
if not held.stage then
  return answer_without_record(ends, gid)
end
if held.stage == 'waiting' or held.requeued == operation then return {'OK', held.stage} end
if held.stage == 'running' then return {'RUNNING', held.owner} end
if held.stage == 'taken' then return {'TAKEN', held.batch} end

local jobs = queues .. task .. ':' .. lane
redis.call('XLEN', jobs)
local before = remove_from_stage({progress = progress, completed = completed, aborted = aborted, expired = expired,
  dead = dead, dead_letters = dead_letters}, gid, held)
local payload = held.payload
if before ~= 'aborted' then
  end_tokens(progress, 'resampled', record)
  count_bytes(bytes, 0, free_payload(garbage, gid, held))
  payload = 'init'
  redis.call('HSET', record, 'status', 'init', 'payload', 'init', 'chunks', 1, 'size', num(held.prompt), 'crc', '',
    'version', '', 'lineage', '', 'tokens', 0)
end
redis.call('HSET', record, 'tries', 0, 'requeued', operation, 'released', '')
to_waiting(jobs, record, gid, lane, payload)
keep_age(age_index, gid, payload, held.version)
wake(bell_workers, 1)
log_event(events, 'requeued', 'gid', gid, 'from', before)
return {'OK', before}
