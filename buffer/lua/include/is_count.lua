-- is_count: how many values a tail of KEYS or ARGV may have.

local function is_count(values, width, least, most)
  return values % width == 0 and values >= least * width and values <= most * width
end
