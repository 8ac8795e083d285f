-- is_int: the type `0..9` of an argument.
-- include: refuse

-- as Redis itself writes integers: no sign, no leading zero
local function is_int(value, least, most)
  if #value > 16 or not (find(value, '^[1-9]%d*$') or value == '0') then return false end
  local number = tonumber(value)
  return number >= least and number <= most
end
