-- staleness: living_version, pool_score and age_of, how old a group counts (I8).
-- include: numbers

local fork_list

-- I8: weights that a trainer forked away from are gone; M counts as min(M, every fork opened after its lineage).
local function living_version(lineages, lineage, version)
  fork_list = fork_list or redis.call('LRANGE', lineages, -1000, -1)
  for i = #fork_list, 1, -1 do
    local name, fork = string.match(fork_list[i], '^(.*):(%d+)$')
    if name == lineage then break end
    if tonumber(fork) < tonumber(version) then version = fork end
  end
  return version
end

-- The score of a group in a pool: its version; or, with token staleness (`token_lead` steps stricter), the version of a group
-- that expires together with the first rollout of this one that has no tokens left to train.
local function pool_score(version, last, token_lead)
  if not version or version == '' then return '+inf' end
  if not token_lead or not last or last == '' then return version end
  return int(math.min(tonumber(version), tonumber(last) - token_lead))
end

-- Compute the age of a group from an argument of the type `ages`; only living versions count. Return its version and lineage, its score, the fields that only some groups have, and the version of the
-- member that expires last, at most; nil where all members are as old as the group.
local function age_of(lineages, made_by, token_lead)
  local found, newest = {oldest = {'', ''}, last = {'', ''}}, nil
  for what, lineage, version in string.gmatch(made_by, '(%l+) (%S+) (%d+)') do
    local least, living = found[what], living_version(lineages, lineage, version)
    if what == 'newest' then
      newest = math.max(newest or 0, tonumber(living))
    elseif least[1] == '' or tonumber(living) < tonumber(least[1]) then
      found[what] = {living, lineage}
    end
  end
  local oldest, last = found.oldest, found.last
  local fields = {}
  if token_lead then fields = {'last', last[1], 'last_lineage', last[2]} end
  if newest then fields[#fields + 1], fields[#fields + 2] = 'newest', int(newest) end
  return oldest[1], oldest[2], pool_score(oldest[1], last[1], token_lead), fields, newest
end
