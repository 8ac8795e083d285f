-- is_text: the type `text..9` of an argument.
-- include: refuse

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
