-- is_number: the type `number` of an argument.
-- include: refuse

local function is_number(value)
  if not (find(value, '^%-?%d+%.?%d*$') or find(value, '^%-?%d+%.?%d*e[+-]?%d+$')) then return false end
  return #value <= 32 and math.abs(tonumber(value)) < math.huge
end
