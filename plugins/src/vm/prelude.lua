-- Runs once in a fresh VM, before the sandbox closes: caps what escapes the interrupt, removes what policies must not
-- have, and returns the pieces that the host needs.
local native = ...

-- Single library calls that never reach an interrupt, and whose time grows with the product or the range of their
-- arguments instead of with memory.
local MOVE_MAX = 100000
local SEARCH_MAX = 10000000
local move, find, split, error, type = table.move, string.find, string.split, error, type

table.move = function(a, f, e, t, ...)
  if type(f) == "number" and type(e) == "number" and e - f > MOVE_MAX then
    error("table.move: at most 100000 elements", 2)
  end
  return move(a, f, e, t, ...)
end

local function too_large(s, p)
  return type(s) == "string" and type(p) == "string" and #s * #p > SEARCH_MAX
end

string.find = function(s, p, ...)
  if too_large(s, p) then
    error("string.find: text and pattern are too long", 2)
  end
  return find(s, p, ...)
end

string.split = function(s, p)
  if too_large(s, p) then
    error("string.split: text and separator are too long", 2)
  end
  return split(s, p)
end

-- A library call on N items that is cheap for each of them is bounded by memory; these two are not cheap.
local SORT_MAX = 50000
local sort = table.sort
table.sort = function(t, ...)
  if type(t) == "table" and rawlen(t) > SORT_MAX then
    error("table.sort: at most 50000 elements", 2)
  end
  return sort(t, ...)
end

local collect = collectgarbage

-- Chance comes from llmgw.rand(), which can be reproduced.
math.random, math.randomseed = nil, nil

local KEPT = {
  math = true, string = true, table = true, bit32 = true, buffer = true, utf8 = true,
  pairs = true, ipairs = true, next = true, select = true, type = true, typeof = true, tostring = true, tonumber = true,
  assert = true, error = true, pcall = true, setmetatable = true, getmetatable = true, rawget = true, rawequal = true, rawlen = true,
}
local globals = native.globals
local unwanted = {}
for name in globals do
  if not KEPT[name] then
    unwanted[#unwanted + 1] = name
  end
end
for _, name in unwanted do
  globals[name] = nil
end

globals.require = function(name)
  local value, refused = native.require(name)
  if refused then
    error(refused, 2)
  end
  return value
end

globals.llmgw = {
  api = 1,
  generation = native.generation,
  rand = native.rand,
  log = function(text)
    local refused = native.log(tostring(text))
    if refused then
      error(refused, 2)
    end
  end,
}

-- Bytes of all live objects: the allocator hands out pages, so it can't tell.
local function heap_bytes()
  return collect("count") * 1024
end

-- The metatable of an input: a field that is known and nil is unknown, any other one is a mistake.
local function input_metatable(noun, fields)
  local known = {}
  for _, name in fields do
    known[name] = true
  end
  return {
    __index = function(_, name)
      if known[name] then
        return nil
      end
      error(native.no_field(noun, name, fields), 2)
    end,
    __newindex = function(_, name)
      error("inputs are read-only: can't set '" .. tostring(name) .. "' of " .. noun, 2)
    end,
    __metatable = false,
  }
end

return input_metatable, heap_bytes
