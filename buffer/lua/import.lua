#!lua
-- import: put a completed group of a file into the pool of its task; its draw is the next one of the imported.
-- The caller has stored its bytes, and those of its prompt, under the token of this import.
-- KEYS[1] progress   HASH     of the task
-- KEYS[2] completed  ZSET     pool of the task
-- KEYS[3] groups     prefix of the group records (HASH)
-- KEYS[4] lineages   LIST
-- KEYS[5] bell       LIST     of the trainer
-- KEYS[6] events     STREAM
-- KEYS[7] payload_prompt  STRING  bytes of the prompt, under the token
-- KEYS[8] payload_init    STRING  where an expired group finds its prompt
-- KEYS[9] order      ZSET     of the completed groups of the task, where the policy needs one
-- KEYS[10+] payload  STRING   the chunks, in order
-- ARGV[1] task       name
-- ARGV[2] gid
-- ARGV[3] token      of this import
-- ARGV[4] draw       that the gid has
-- ARGV[5] first      draw of the first imported group of every task
-- ARGV[6] samples    rollouts in the group
-- ARGV[7] tokens     in all responses
-- ARGV[8] size       bytes of all chunks
-- ARGV[9] crc        CRC-32 of all bytes, hex
-- ARGV[10] reward    sum of all scores
-- ARGV[11] order     place in the index: arrival | bucket:<n> (buckets take turns) | a score; '' = no index
-- ARGV[12+] lineage, version  pairs: the oldest policy version of each lineage in the group; none = it never ages
-- replies OK arrival | DRAW next | FULL cursor | MISSING size_found
-- keeps I1 (imported counts with enqueued), I3 (takes no draw of the data set), I8, I13 (token), I14 (moves a name, reads nothing)
local progress, completed, groups, lineages, bell, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local payload_prompt, payload_init, order = KEYS[7], KEYS[8], KEYS[9]
local task, gid, token, draw, first = ARGV[1], ARGV[2], ARGV[3], num(ARGV[4]), num(ARGV[5])
local samples, tokens, size, crc, reward = ARGV[6], ARGV[7], num(ARGV[8]), ARGV[9], ARGV[10]
local place = ARGV[11]

local record = groups .. gid
local held = redis.call('HMGET', record, 'payload', 'arrival')
local done = redis.call('HMGET', progress, 'imported', 'import_token', 'cursor')
if held[1] == token or done[2] == token then return {'OK', held[2] or ''} end
if num(done[3]) >= first then return {'FULL', done[3]} end
if draw ~= first + num(done[1]) then return {'DRAW', int(first + num(done[1]))} end
local found = 0
for i = 10, #KEYS do found = found + redis.call('STRLEN', KEYS[i]) end
if found ~= size or redis.call('EXISTS', payload_prompt) == 0 then return {'MISSING', int(found)} end

local version, lineage = '', ''
for i = 12, #ARGV - 1, 2 do
  local living = living_version(lineages, ARGV[i], ARGV[i + 1])
  if version == '' or tonumber(living) < tonumber(version) then version, lineage = living, ARGV[i] end
end

redis.call('RENAME', payload_prompt, payload_init)
redis.call('PERSIST', payload_init)
for i = 10, #KEYS do redis.call('PERSIST', KEYS[i]) end
local arrival = string.format('%010d', redis.call('HINCRBY', progress, 'arrivals', 1))
redis.call('HSET', record, 'task', task, 'draw', int(draw), 'stage', 'pool', 'status', 'completed', 'lane', 'resume',
  'tries', 0, 'aborts', 0, 'token', '', 'owner', '', 'entry', '', 'payload', token, 'chunks', #KEYS - 9,
  'size', int(size), 'crc', crc, 'version', version, 'lineage', lineage, 'samples', samples, 'tokens', tokens,
  'arrival', arrival, 'reward', reward, 'submitted_ms', int(now_ms()))
redis.call('ZADD', completed, version == '' and '+inf' or version, arrival .. ':' .. gid)
put_in_order(order, progress, place, arrival, gid)
redis.call('HINCRBY', progress, 'imported', 1)
redis.call('HSET', progress, 'import_token', token)
ring(bell, 1)
log_event(events, 'imported', 'gid', gid, 'version', version)
return {'OK', arrival}
