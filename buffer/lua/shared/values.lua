-- values: numbers and text, and the checks of arguments by their types.

local find, call = string.find, redis.call

local function refuse(what, want, got)
  local shown = string.gsub(string.sub(got or 'nothing', 1, 80), '[^\032-\126]', '?')
  return redis.error_reply('RMQ_ARG ' .. SCRIPT .. ': ' .. what .. ' must be ' .. want .. ', got ' .. shown)
end

-- Return the number; nil for other text than Redis itself writes (a sign, a leading zero).
local function as_int(value, least, most)
  if value == '0' then return least <= 0 and 0 or nil end
  if #value > 16 or not find(value, '^[1-9]%d*$') then return nil end
  local number = tonumber(value)
  return number >= least and number <= most and number or nil
end

local function is_count(values, width, least, most)
  return values % width == 0 and values >= least * width and values <= most * width
end

-- UTF-8 without overlong forms and surrogates, which decoders of all languages accept
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

-- "what lineage version" of at most 128 weights, with commas between: see submit.lua.
local function is_ages(value)
  local function read(what, lineage, version)
    local is_known = what == 'oldest' or what == 'last' or what == 'newest'
    return is_known and #lineage <= 64 and as_int(version, 0, 9007199254740991) and '' or nil
  end
  local rest, weights = string.gsub(value .. ',', '(%l+) ([%w_.-]+) (%d+),', read)
  return rest == '' and weights <= 128
end

-- Return some fields of a hash by their names.
local function fields_of(key, ...)
  local found, values = {}, redis.call('HMGET', key, ...)
  for i, name in ipairs({...}) do found[name] = values[i] or nil end
  return found
end

local function num(value) return tonumber(value or 0) or 0 end

-- Lua numbers are doubles: tostring(1700000000123) would be 1.7e+12.
local function int(value) return string.format('%.0f', value) end
