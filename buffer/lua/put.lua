#!lua
-- put: a group that no worker holds goes into the pool of its status; its draw is the next one of those from outside.
-- The caller has stored its bytes, and those of its prompt, under the token of this group.
-- include: bells, byte_count, clock, events, memory_marks, numbers, order_index, payloads, staleness
-- KEYS[1] progress   HASH     of the task
-- KEYS[2] ledger     HASH     of the trainer
-- KEYS[3] completed  ZSET     pool of the task
-- KEYS[4] aborted    ZSET     pool of the task
-- KEYS[5] expired    ZSET     pool of the task
-- KEYS[6] dropped    STRING   bitmap
-- KEYS[7] groups     prefix of the group records (HASH)
-- KEYS[8] lineages   LIST
-- KEYS[9] garbage    SET
-- KEYS[10] bell_trainer   LIST
-- KEYS[11] bell_producer  LIST
-- KEYS[12] events    STREAM
-- KEYS[13] order     ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[14] bytes     HASH
-- KEYS[15] unpinned  SET
-- KEYS[16+] payload  STRING* x0..1026  the prompt under <token>-prompt, where an expired group finds it, the chunks in
--                             order; none in a cluster
-- ARGV[1] task       name
-- ARGV[2] gid        gid
-- ARGV[3] token      token                      of the bytes
-- ARGV[4] operation  token                      nonce of a call that puts groups one after the other
-- ARGV[5] place      1..1_000_000               of the group among those of the call, from 1 on
-- ARGV[6] counter    put|imported
-- ARGV[7] draw       0..69_999_999              that the gid has
-- ARGV[8] first      0..33_554_432              draw of the first group from outside of every task
-- ARGV[9] status     completed|aborted|expired
-- ARGV[10] threshold 0..                        stale threshold in steps
-- ARGV[11] retryable 0|1                        1 = what is too old starts again from its prompt; 0 = dropped
-- ARGV[12] samples   1..4096                    rollouts in the group
-- ARGV[13] tokens    0..1_000_000_000_000       in all responses
-- ARGV[14] size      0..1_000_000_000_000       bytes of all chunks
-- ARGV[15] crc       hex                        CRC-32 of all bytes, hex
-- ARGV[16] reward    number                     sum of all scores
-- ARGV[17] order     ''|arrival|bucket|number   place in the index: buckets take turns, a number is a score; '' = no index
-- ARGV[18] lag       ''|0..                     steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV[19] mark      0..                        payload bytes of the run from which nothing is taken in; 0 = no bound
-- ARGV[20] chunks    1..1024
-- ARGV[21] prompt    0..1_048_576               bytes of the prompt
-- ARGV[22+] what, lineage, version  oldest|last, name, 0.. x0..128  as in submit; none = it never ages
-- replies OK status (completed | aborted | expired | dropped) | DRAW next | NO_DRAWS cursor | FULL held mark | MISSING size_found
-- keeps I1 (put and imported count with enqueued), I3 (takes no draw of the data set), I8, I12, I13 (operation and place), I14 (moves a name, reads nothing)
local progress, ledger, completed, aborted, expired = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local dropped, groups, lineages, garbage = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local bell_trainer, bell_producer, events = KEYS[10], KEYS[11], KEYS[12]
local order, bytes, unpinned = KEYS[13], KEYS[14], KEYS[15]
local payload_prompt, payload_init = unpack(KEYS, 16)
local task, gid, token, operation, place = ARGV[1], ARGV[2], ARGV[3], 'put:' .. ARGV[4], num(ARGV[5])
local counter, draw, first, status = ARGV[6], num(ARGV[7]), num(ARGV[8]), ARGV[9]
local threshold, retryable, mark = num(ARGV[10]), ARGV[11] == '1', num(ARGV[19])
local samples, tokens, size, crc, reward, turn = ARGV[12], ARGV[13], num(ARGV[14]), ARGV[15], ARGV[16], ARGV[17]

local done = redis.call('HMGET', progress, operation, 'cursor', 'put', 'imported')
redis.call('HLEN', groups .. gid)
local last, was = string.match(done[1] or '', '^(%d+) (%a+)$')
if num(last) >= place then return {'OK', was} end
if num(done[2]) >= first then return {'NO_DRAWS', done[2]} end
local next_free = first + num(done[3]) + num(done[4])
if draw ~= next_free then return {'DRAW', int(next_free)} end
if is_full(bytes, mark) then return {'FULL', int(held_bytes(bytes)), int(mark)} end
local chunks, prompt = ARGV[20], num(ARGV[21])
local found = seen_bytes(KEYS, 16, 2, num(chunks), size)
if payload_prompt and redis.call('EXISTS', payload_prompt) == 0 then found = found - prompt end
if found ~= size then return {'MISSING', int(found)} end

local version, lineage, score, fields = age_of(lineages, ARGV, 22, ARGV[18])
local cut = num(redis.call('HGET', ledger, 'taken')) + 1 - threshold
if score ~= '+inf' and tonumber(score) < cut then status = 'expired' end
if status == 'expired' and not retryable then status = 'dropped' end

redis.call('HINCRBY', progress, counter, 1)
redis.call('HSET', progress, operation, int(place) .. ' ' .. status)
if status == 'expired' or status == 'dropped' then redis.call('SADD', garbage, gid .. ' ' .. token .. ' ' .. chunks) end
if status == 'dropped' then
  redis.call('SADD', garbage, gid .. ' ' .. token .. '-prompt 1')
  redis.call('SETBIT', dropped, draw, 1)
  redis.call('HINCRBY', progress, 'dropped', 1)
  log_event(events, counter, 'gid', gid, 'status', status)
  return {'OK', status}
end

if payload_prompt then
  redis.call('RENAME', payload_prompt, payload_init)
  redis.call('PERSIST', payload_init)
else
  redis.call('SADD', unpinned, gid .. ' ' .. token .. '-prompt 1')
end
if status == 'expired' then
  -- as in refresh: it starts again from its prompt
  count_bytes(bytes, prompt, 0)
  token, chunks, size, crc, version, lineage, score, tokens, reward = 'init', 1, prompt, '', '', '', '+inf', 0, 0
else
  count_bytes(bytes, prompt + size, 0)
  pin(KEYS, 16 + 2, unpinned, gid .. ' ' .. token .. ' ' .. chunks)
end
local arrival = string.format('%010d', redis.call('HINCRBY', progress, 'arrivals', 1))
redis.call('HSET', groups .. gid, 'payload', token, 'chunks', chunks, 'size', int(size), 'crc', crc, 'samples', samples,
  'version', version, 'stage', 'pool', 'status', status, 'task', task, 'draw', int(draw), 'tries', 0, 'aborts', 0,
  'lineage', lineage, 'tokens', tokens, 'arrival', arrival, 'reward', reward, 'submitted_ms', int(now_ms()),
  'prompt', prompt)
if fields then redis.call('HSET', groups .. gid, unpack(fields)) end
local pools = {completed = completed, aborted = aborted, expired = expired}
redis.call('ZADD', pools[status], score, arrival .. ':' .. gid)
if status == 'completed' then put_in_order(order, progress, turn, arrival, gid) end
ring(status == 'completed' and bell_trainer or bell_producer, 1)
log_event(events, counter, 'gid', gid, 'status', status, 'version', version)
return {'OK', status}
