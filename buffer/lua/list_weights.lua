#!lua flags=allow-oom
-- list_weights: list a version of weights before its chunks are stored, so that it can be found and deleted, and store
-- its manifest after them: from then on it exists.
-- KEYS weights LIST, weights_manifest STRING
-- ARGV label    weights
-- ARGV manifest bytes..67108864  empty = its chunks follow
-- replies OK
-- keeps I13 (absolute)

if manifest == '' then
  redis.call('LREM', weights, 0, label)
  redis.call('RPUSH', weights, label)
else
  redis.call('SET', weights_manifest, manifest)
end
return {'OK'}
