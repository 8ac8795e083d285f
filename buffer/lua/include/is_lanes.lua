-- is_lanes: the type `lanes` of an argument.
-- include: refuse

local function is_lanes(value)
  if #value > 32 or find(value, '[^a-z ]') then return false end
  for lane in string.gmatch(value, '%S+') do
    if lane ~= 'eval' and lane ~= 'resume' and lane ~= 'fresh' then return false end
  end
  return true
end
