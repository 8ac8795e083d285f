#!lua flags=allow-oom
-- restore_batch: after a loss, restore a batch that the server forgot from the manifest in the trainer's checkpoint.
-- Its bytes are still there: its groups return to it from wherever they reappeared.
-- KEYS control HASH, ledger HASH, batch LIST, groups prefix, queues prefix, pools prefix, accounts prefix
-- KEYS ages prefix, leases ZSET, leased_by prefix, dead ZSET, dead_letters prefix, garbage SET, events STREAM
-- KEYS bytes HASH
-- ARGV nonce  token         of the trainer
-- ARGV step   1..           T: the one after the last taken
-- ARGV header text..262144  of the manifest
-- ARGV entries  text..512 x0..1024  "gid token chunks size crc samples version" of each group, in order
-- replies OK taken | FENCED | GAP taken | GONE gid (unknown, or in another batch)
-- keeps I1, I2 (leases die), I5 (byte for byte: the caller has read the bytes, and removed their expiry), I6, I7, I12, I13 (step), I14

if redis.call('HGET', control, 'trainer') ~= nonce then return {'FENCED'} end
local taken = num(redis.call('HGET', ledger, 'taken'))
if step == taken and redis.call('EXISTS', batch) == 1 then return {'OK', int(taken)} end
if step ~= taken + 1 then return {'GAP', int(taken)} end
local found, tasks, under = {}, {}, {groups = groups, queues = queues, pools = pools, accounts = accounts, ages = ages,
  leases = leases, leased_by = leased_by, dead = dead, dead_letters = dead_letters}
for _, line in ipairs(entries) do
  local gid, token, chunks, size, crc, samples, version = string.match(line, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  local held = held_fields(groups .. gid)
  if not held or held.stage == 'taken' then return {'GONE', gid} end
  local task = string.match(gid, '^(.*)%-%d+$')
  tasks[task] = tasks[task] or task_keys(under, task)
  read_place(tasks[task], held)
  found[#found + 1] = {line = line, gid = gid, token = token, size = num(size), held = held, keys = tasks[task],
    fields = {'payload', token, 'chunks', chunks, 'size', size, 'crc', crc, 'samples', samples, 'version', version}}
end

redis.call('UNLINK', batch)
local name, lines, groups_of = string.match(batch, ':batch:(.*)$'), {header}, {}
for _, entry in ipairs(found) do
  local gid, keys, held, record = entry.gid, entry.keys, entry.held, groups .. entry.gid
  remove_from_stage(keys, gid, held)
  for k = 2, #entry.fields, 2 do if entry.fields[k] == '-' then entry.fields[k] = '' end end
  if held.payload ~= entry.token then
    end_tokens(keys.progress, 'resampled', record)
    -- a manifest has no lineages: every fork will count, and all tokens as the oldest (I8)
    redis.call('HDEL', record, 'newest', 'cut')
    redis.call('HSET', record, 'lineage', '', 'last', entry.fields[12], 'last_lineage', '')
    count_bytes(bytes, entry.size, free_payload(garbage, gid, held))
  end
  local arrival = held.arrival or next_arrival(keys.progress)
  redis.call('HDEL', record, 'token', 'lane', 'entry', 'claimed_ms')
  redis.call('HSET', record, 'stage', 'taken', 'status', 'completed', 'batch', name, 'arrival', arrival, unpack(entry.fields))
  groups_of[keys.progress] = (groups_of[keys.progress] or 0) + 1
  lines[#lines + 1] = entry.line
end
redis.call('RPUSH', batch, unpack(lines))
for account, number in pairs(groups_of) do
  for _, counter in ipairs({'consumed', 'taken', 'reasserted'}) do redis.call('HINCRBY', account, counter, number) end
end
redis.call('HSET', ledger, 'taken', int(step))
redis.call('HSET', control, 'trainer_seen_ms', int(now_ms()))
log_event(events, 'restored', 'step', int(step), 'groups', #entries)
return {'OK', int(step)}
