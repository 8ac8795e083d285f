#!lua flags=allow-oom
-- publish_weights: record the newest weights of a run. Workers without them may not claim.
-- include: bells, clock, control_changes, control_state, events, numbers
-- KEYS control       HASH    and the channel that carries the hint
-- KEYS events        STREAM
-- KEYS bell_producer LIST
-- ARGV nonce    token       of the trainer
-- ARGV weights  weights     "lineage:version"
-- ARGV path     text..4096  folder or address of the weights
-- ARGV checksum text..256   of their manifest
-- replies OK 6 x control | FENCED
-- keeps I7, I9, I13 (natural key: the weights)

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
if redis.call('HGET', control, 'weights') ~= weights then
  redis.call('HSET', control, 'weights', weights, 'weights_path', path, 'weights_checksum', checksum,
    'weights_ms', int(now_ms()))
  redis.call('HINCRBY', control, 'epoch', 1)
  publish_hint(control)
  ring(bell_producer, 1)
  log_event(events, 'weights', 'weights', weights)
end
return {'OK', unpack(control_state(control))}
