-- types: what the headers' types mean. buffer/script_header.py puts its checks in front of every script's body.

local find, call = string.find, redis.call

local function refuse(what, want, got)
  local shown = string.gsub(string.sub(got or 'nothing', 1, 80), '[^\032-\126]', '?')
  return redis.error_reply('RMQ_ARG ' .. SCRIPT .. ': ' .. what .. ' must be ' .. want .. ', got ' .. shown)
end

local function is_count(values, width, least, most)
  return values % width == 0 and values >= least * width and values <= most * width
end

-- as Redis itself writes integers: no sign, no leading zero
local function is_int(value, least, most)
  if #value > 16 or not (find(value, '^[1-9]%d*$') or value == '0') then return false end
  local number = tonumber(value)
  return number >= least and number <= most
end

local function is_number(value)
  if not (find(value, '^%-?%d+%.?%d*$') or find(value, '^%-?%d+%.?%d*e[+-]?%d+$')) then return false end
  return #value <= 32 and math.abs(tonumber(value)) < math.huge
end

local function is_lanes(value)
  if #value > 32 or find(value, '[^a-z ]') then return false end
  for lane in string.gmatch(value, '%S+') do
    if lane ~= 'eval' and lane ~= 'resume' and lane ~= 'fresh' then return false end
  end
  return true
end

-- UTF-8 without overlong forms and surrogates: what every reader in every language accepts
local function is_text(value, bytes)
  if #value > bytes then return false end
  if not find(value, '[\128-\255]') then return true end
  if find(value, '\224[\128-\159]') or find(value, '\237[\160-\191]') then return false end
  if find(value, '\240[\128-\143]') or find(value, '\244[\144-\191]') then return false end
  local rest = string.gsub(value, '[\240-\244][\128-\191][\128-\191][\128-\191]', '')
  rest = string.gsub(rest, '[\224-\239][\128-\191][\128-\191]', '')
  rest = string.gsub(rest, '[\194-\223][\128-\191]', '')
  return not find(rest, '[\128-\255]')
end
