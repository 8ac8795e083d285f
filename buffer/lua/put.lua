#!lua
-- put: add a group that no worker holds to the pool of its status, as the next draw of imported groups.
-- The caller has stored its bytes, and those of its prompt, under the token of this group.
-- KEYS progress HASH, ledger HASH, completed ZSET, aborted ZSET, expired ZSET, dropped STRING, groups prefix
-- KEYS lineages LIST, garbage SET, bell_trainer LIST, bell_producer LIST, events STREAM, bytes HASH
-- KEYS payloads  STRING* x3..1026  the prompt under <token>-prompt, where an expired group reads it, the chunks in order
-- ARGV task      name
-- ARGV gid       gid
-- ARGV token     token                      of the bytes
-- ARGV operation token                      nonce of a call that puts groups one after the other
-- ARGV place     1..1_000_000               number of the group in the call, from 1 on
-- ARGV counter   put|imported
-- ARGV draw      0..69_999_999              that the gid has
-- ARGV first     0..33_554_432              draw of the first imported group of every task
-- ARGV status    completed|aborted|expired
-- ARGV threshold 0..                        stale threshold in steps
-- ARGV retryable 0|1                        1 = members that are too old start again; 0 = their group is dropped
-- ARGV samples   1..4096                    rollouts in the group
-- ARGV tokens    0..1_000_000_000_000       in all responses
-- ARGV size      0..1_000_000_000_000       bytes of all chunks
-- ARGV crc       hex                        CRC-32 of all bytes, hex
-- ARGV reward    number                     sum of all scores
-- ARGV token_lead ''|0..                     steps by which single tokens expire earlier than groups; '' = they do not
-- ARGV byte_limit 0..                        payload bytes of the run from which no group is accepted; 0 = no bound
-- ARGV chunks    1..1024
-- ARGV prompt    0..1_048_576               bytes of the prompt
-- ARGV made_by   ''|ages                    as in submit; '' = no limit of age
-- replies OK status (completed | aborted | expired | dropped) | DRAW next | NO_DRAWS cursor | FULL held byte_limit | MISSING size_found
-- keeps I1 (put and imported count with enqueued), I3 (takes no draw of the data set), I8, I12, I13 (operation and place), I14 (renames a key, reads nothing)

local payload_prompt, payload_init = unpack(payloads)
local field = 'put:' .. operation

local done = redis.call('HMGET', progress, field, 'cursor', 'put', 'imported')
redis.call('HLEN', groups .. gid)
local last, was = string.match(done[1] or '', '^(%d+) (%a+)$')
if num(last) >= place then return {'OK', was} end
if num(done[2]) >= first then return {'NO_DRAWS', done[2]} end
local next_free = first + num(done[3]) + num(done[4])
if draw ~= next_free then return {'DRAW', int(next_free)} end
if is_full(bytes, byte_limit) then return {'FULL', int(held_bytes(bytes)), int(byte_limit)} end
local found = seen_bytes(payloads, 2, chunks)
if redis.call('EXISTS', payload_prompt) == 0 then found = found - prompt end
if found ~= size then return {'MISSING', int(found)} end

local version, lineage, score, fields, newest = age_of(lineages, made_by, token_lead)
local cut = next_step(ledger) - threshold
if score ~= '+inf' and tonumber(score) < cut then status = 'expired' end
-- as in expire.lua: members that are not too old keep their tokens
local keeps_bytes = status ~= 'expired' or (newest and newest >= cut)
if status == 'expired' and not retryable then status = 'dropped' end

redis.call('HINCRBY', progress, counter, 1)
redis.call('HSET', progress, field, int(place) .. ' ' .. status)
if status == 'dropped' or not keeps_bytes then redis.call('SADD', garbage, gid .. ' ' .. token .. ' ' .. chunks) end
if status == 'dropped' then
  redis.call('SADD', garbage, gid .. ' ' .. token .. '-prompt 1')
  redis.call('SETBIT', dropped, draw, 1)
  redis.call('HINCRBY', progress, 'dropped', 1)
  log_event(events, counter, 'gid', gid, 'status', status)
  return {'OK', status}
end

redis.call('RENAME', payload_prompt, payload_init)
redis.call('PERSIST', payload_init)
if keeps_bytes then
  count_bytes(bytes, prompt + size, 0)
  pin(payloads, 2, chunks)
else
  count_bytes(bytes, prompt, 0)
  token, chunks, size, crc, tokens, reward = 'init', 1, prompt, '', 0, 0
end
if status == 'expired' then
  version, lineage, score = '', '', '+inf'
  fields[#fields + 1], fields[#fields + 2] = 'cut', int(cut)
end
local arrival = next_arrival(progress)
redis.call('HSET', groups .. gid, 'payload', token, 'chunks', chunks, 'size', int(size), 'crc', crc, 'samples', samples,
  'version', version, 'stage', 'pool', 'status', status, 'task', task, 'draw', int(draw), 'tries', 0, 'aborts', 0,
  'lineage', lineage, 'tokens', int(tokens), 'arrival', arrival, 'reward', reward, 'submitted_ms', int(now_ms()),
  'prompt', prompt)
if #fields > 0 then redis.call('HSET', groups .. gid, unpack(fields)) end
local pools = {completed = completed, aborted = aborted, expired = expired}
redis.call('ZADD', pools[status], score, arrival .. ':' .. gid)
wake(status == 'completed' and bell_trainer or bell_producer, 1)
log_event(events, counter, 'gid', gid, 'status', status, 'version', version)
return {'OK', status}
