#!lua
-- keep_verdict: keep what a judge said of a text, so that no worker asks again. There are two halves: when the newer one
-- is full, it becomes the older one, whose verdicts are dropped. A verdict that is used again enters the newer half.
-- KEYS verdicts HASH, verdicts_before HASH, judge_use HASH
-- ARGV digest     token          of the judge and all that it has read
-- ARGV verdict    bytes..65536   '' = only count
-- ARGV entries    0..            most verdicts in both halves
-- ARGV most_bytes 0..            most bytes of them
-- ARGV who        text..160      task and process
-- ARGV counts     text..100      what the process has used for the task since it began: numbers that only rise
-- replies OK
-- keeps I12, I13 (digest; absolute counts)

local function total(numbers)
  local sum = 0
  for number in string.gmatch(numbers, '%d+') do sum = sum + tonumber(number) end
  return sum
end

-- of two calls at the same time, the later one may come first
if total(counts) > total(redis.call('HGET', judge_use, who) or '') then redis.call('HSET', judge_use, who, counts) end
if verdict == '' or redis.call('HEXISTS', verdicts, digest) == 1 then return {'OK'} end
local held = num(redis.call('HGET', verdicts, 'bytes'))
if redis.call('HLEN', verdicts) > entries / 2 or (held > 0 and held + #verdict > most_bytes / 2) then
  redis.call('RENAME', verdicts, verdicts_before)
end
redis.call('HSET', verdicts, digest, verdict)
redis.call('HINCRBY', verdicts, 'bytes', #verdict)
return {'OK'}
