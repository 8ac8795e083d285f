-- is_ages: the type `ages` of an argument.
-- include: as_int

-- "what lineage version" of at most 128 weights, with commas between: see submit.lua.
local function is_ages(value)
  local function read(what, lineage, version)
    local is_known = what == 'oldest' or what == 'last' or what == 'newest'
    return is_known and #lineage <= 64 and as_int(version, 0, 9007199254740991) and '' or nil
  end
  local rest, weights = string.gsub(value .. ',', '(%l+) ([%w_.-]+) (%d+),', read)
  return rest == '' and weights <= 128
end
