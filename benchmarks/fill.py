"""Fill a pool of any size within seconds, with copies of a record that the scripts have made.

The form of a record can therefore not drift from what the scripts write; the account is checked
afterwards.
"""

from __future__ import annotations

from benchmarks import sample
from benchmarks.bench_run import TASK, BenchRun

_SLICE = 2000

# KEYS: template record, prefix of the records, pool, progress, cursors. ARGV: first draw, groups.
_COPY = """
local template = redis.call('HGETALL', KEYS[1])
local places = {}
for i = 1, #template, 2 do places[template[i]] = i + 1 end
for draw = tonumber(ARGV[1]), ARGV[1] + ARGV[2] - 1 do
  local gid, arrival = string.format('math-%010d', draw), string.format('%010d', draw + 1)
  template[places.draw], template[places.arrival] = string.format('%.0f', draw), arrival
  redis.call('HSET', KEYS[2] .. gid, unpack(template))
  redis.call('ZADD', KEYS[3], template[places.version], arrival .. ':' .. gid)
end
for _, counter in ipairs({'cursor', 'enqueued', 'arrivals'}) do
  redis.call('HINCRBY', KEYS[4], counter, ARGV[2])
end
redis.call('HINCRBY', KEYS[5], 'math', ARGV[2])
"""


def fill(run: BenchRun, groups: int) -> None:
    """Fill the completed pool without payloads; the first group is made through the scripts."""
    run.make_ready(1, sample.SMALL)
    keys = run.keys
    copy = run.raw.register_script(_COPY)
    names = [keys.group(f"{TASK}-{0:010d}"), keys.groups, keys.pool(TASK, "completed")]
    names += [keys.progress(TASK), keys.cursors]
    for draw in range(1, groups, _SLICE):
        copy(names, [draw, min(_SLICE, groups - draw)])
    run.check()
