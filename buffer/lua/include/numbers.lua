-- numbers: num and int, which read and write numbers.

local function num(value) return tonumber(value or 0) or 0 end

-- Lua numbers are doubles: tostring(1700000000123) would be 1.7e+12.
local function int(value) return string.format('%.0f', value) end
