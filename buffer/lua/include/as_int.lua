-- as_int: the type `0..9` of an argument, as a number.
-- include: refuse

-- Return the number; nil for other text than Redis itself writes (a sign, a leading zero).
local function as_int(value, least, most)
  if value == '0' then return least <= 0 and 0 or nil end
  if #value > 16 or not find(value, '^[1-9]%d*$') then return nil end
  local number = tonumber(value)
  return number >= least and number <= most and number or nil
end
