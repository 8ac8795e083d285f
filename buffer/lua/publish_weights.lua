#!lua flags=allow-oom
-- publish_weights: record the newest weights of a run. Workers without them may not claim. Or announce the next weights,
-- which workers fetch while they sample with the newest.
-- KEYS control       HASH    and the channel that carries the hint
-- KEYS events STREAM, bell_producer LIST
-- ARGV nonce    token       of the trainer
-- ARGV weights  weights     "lineage:version"
-- ARGV path     text..4096  folder or address of the weights
-- ARGV checksum text..256   of their manifest
-- ARGV stage    next|newest
-- replies OK 9 x control | FENCED
-- keeps I7, I9, I13 (natural key: the weights, in each stage)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local name = stage == 'next' and 'next_weights' or 'weights'
local lineage, version = string.match(weights, '^(.*):(%d+)$')
-- a call that arrives again behind a later one does not take the weights back
local function is_newer_than(field)
  local of, known = string.match(redis.call('HGET', control, field) or '', '^(.*):(%d+)$')
  return of ~= lineage or tonumber(known) < tonumber(version)
end

if is_newer_than('weights') and is_newer_than(name) then
  redis.call('HDEL', control, 'next_weights', 'next_weights_path', 'next_weights_checksum')
  redis.call('HSET', control, name, weights, name .. '_path', path, name .. '_checksum', checksum)
  redis.call('HINCRBY', control, 'epoch', 1)
  publish_hint(control)
  if stage == 'newest' then
    redis.call('HSET', control, 'weights_ms', int(now_ms()))
    wake(bell_producer, 1)
    log_event(events, 'weights', 'weights', weights)
  end
end
return {'OK', unpack(control_state(control))}
