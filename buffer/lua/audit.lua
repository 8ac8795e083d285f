#!lua flags=allow-oom
-- audit: record what an auditor found in one batch, and bar the workers whose logprobs do not agree.
-- include: clock, events, numbers
-- KEYS audits   HASH
-- KEYS bad_submissions HASH     "since_ms bad barred_ms" by worker
-- KEYS events   STREAM
-- ARGV before   ''|name  position that the auditor read: "step.taken_ms" of the newest audited batch; '' = there is none
-- ARGV after    name     position of this batch
-- ARGV missed   0..      batches between both that were freed before they were audited
-- ARGV finding, worker, gid, detail  agrees|differs|impossible, ''|name, gid, text..512 x0..1024  of each group that was
--                        chosen; worker '' = it is not known any more
-- replies OK | MOVED position (another auditor was faster)
-- keeps I11 (a barred worker claims nothing), I13 (before and after)

local position = string.match(redis.call('HGET', audits, 'position') or '', '^%d+%.%d+$') or ''
if position == after then return {'OK'} end
if position ~= before then return {'MOVED', position} end
local now = int(now_ms())
redis.call('HSET', audits, 'position', after, 'audited_ms', now)
if missed > 0 then redis.call('HINCRBY', audits, 'missed', int(missed)) end
for _, finding, worker, gid, detail in each_unit do
  redis.call('HINCRBY', audits, finding .. ':' .. worker, 1)
  if finding == 'differs' then
    local since, bad, barred_ms = string.match(redis.call('HGET', bad_submissions, worker) or '', '^(%d+) (%d+) (%d+)$')
    if not bad then since, bad, barred_ms = now, 0, '0' end
    if barred_ms == '0' then
      barred_ms = now
      log_event(events, 'worker_barred', 'worker', worker, 'groups', int(num(bad) + 1))
    end
    redis.call('HSET', bad_submissions, worker, since .. ' ' .. int(num(bad) + 1) .. ' ' .. barred_ms)
    redis.call('HSET', audits, 'failed:' .. worker, gid .. ': ' .. detail)
    log_event(events, 'audit_failed', 'worker', worker, 'gid', gid, 'detail', detail)
  end
end
return {'OK'}
