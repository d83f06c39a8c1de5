-- What any sensible admission keeps, whatever its bands are called and its numbers are.

local t = llmgw.test

local CODES = { "queue_full", "tenant_limit", "queue_timeout", "no_replica", "shutting_down" }

local function by_name()
  local bands, names = {}, {}
  for _, band in t.bands {} do
    t.ok(bands[band.name] == nil, "two bands are called " .. band.name)
    bands[band.name] = band
    table.insert(names, band.name)
  end
  t.ok(#names > 0, "there is no band")
  return bands, names
end

local function draw_pool(g)
  return {
    replicas = g:int(0, 8),
    ready = g:int(0, 8),
    saturation = g:maybe(function() return g:number(0, 10) end),
    kv = g:maybe(function() return g:number(0, 1) end),
    queued = g:int(0, 100000),
    queued_cost = g:number(0, 1e9),
    arrivals_s = g:number(0, 1000),
    rejected_s = g:number(0, 1000),
  }
end

t.property("a hint can't raise a request above its tenant's best band", 60, function(g)
  local bands, names = by_name()
  local best = g:pick(names)
  local got = t.classify(
    { band_hint = g:maybe(function() return g:pick(names) end), input_tokens = g:int(1, 200000) },
    { band = g:pick(names), best_band = best }
  )
  t.ok(bands[got], "'" .. got .. "' is no band")
  t.ok(bands[got].priority <= bands[best].priority, got .. " is above " .. best)
end)

t.property("whatever a client asks for, its request gets into some band", 40, function(g)
  local bands, names = by_name()
  local band = g:pick(names)
  local got = t.classify({ band_hint = g:text(20) }, { band = band, best_band = band })
  t.ok(bands[got], "'" .. got .. "' is no band")
end)

t.case("a classify that fails leaves a request in its tenant's band", function()
  local _, names = by_name()
  for _, name in names do
    if t.fault("admission.classify", "error") then
      t.equal((t.classify({}, { band = name, best_band = name })), name)
    end
  end
end)

t.property("a busy pool has the same bands as an idle one, and their floors leave room", 30, function(g)
  local bands, names = by_name()
  local now = t.bands(draw_pool(g))
  t.equal(#now, #names)
  local floors = 0
  for _, band in now do
    t.ok(bands[band.name], band.name)
    t.ok(band.max_queue > 0 and band.ttl_ms > 0, "nobody could wait in " .. band.name)
    floors += band.floor
  end
  t.ok(floors <= 0.8, "the floors leave nothing to share by priority")
end)

t.property("the gate lets something through", 50, function(g)
  local gate = t.gate(draw_pool(g))
  t.ok(gate.hold_ms >= 0 and gate.kv_max > 0 and gate.kv_max <= 1)
  t.ok(gate.inflight_max == nil or gate.inflight_max > 0)
end)

t.case("bands and gate have a fallback", function()
  by_name()
  t.fault("admission.bands", "nil")
  t.fault("admission.gate", "budget")
  by_name()
  t.ok(t.gate({}).kv_max > 0)
end)

t.property("a refusal is 429 or 503, and waits a second to a minute", 50, function(g)
  local refusal = t.reject({ model = "example", input_tokens = g:int(1, 200000) }, g:pick(CODES))
  t.ok(refusal.status == 429 or refusal.status == 503, refusal.status)
  local wait = refusal.wait_ms
  t.ok(wait == nil or (wait >= 1000 and wait <= 60000), wait)
end)

-- One flood of requests for each band, all at once.
local function flood(names)
  local tenants = {}
  for _, name in names do
    table.insert(tenants, { name = name, band = name, clients = 12, input_tokens = 200, output_tokens = 24 })
  end
  return t.simulate { seconds = 20, tenants = tenants }
end

t.case("a band with a floor is served, however much waits above it", function()
  local bands, names = by_name()
  local result = flood(names)
  for name, band in bands do
    local got = result.bands[name]
    -- A band that sheds is let in only while there is room, and a policy may put all of a band's requests elsewhere.
    if band.floor > 0 and got.requests > 0 and got.refused == 0 then
      t.ok(got.share > band.floor / 2, name .. " got " .. got.share .. " of the service")
    end
  end
end)

t.case("the highest band doesn't wait behind a flood of the lowest", function()
  local bands, names = by_name()
  table.sort(names, function(a, b) return bands[a].priority > bands[b].priority end)
  local highest, lowest = names[1], names[#names]
  -- With one band there is nobody to go before, and a short queue of it may be full at all times.
  if highest == lowest then
    return
  end
  local result = t.simulate {
    seconds = 20,
    tenants = {
      { name = "person", band = highest, clients = 1, think_ms = 500, input_tokens = 200, output_tokens = 24 },
      { name = "flood", band = lowest, clients = 40, input_tokens = 200, output_tokens = 24 },
    },
  }
  local person, flood = result.tenants.person, result.tenants.flood
  t.ok(person.served > 0)
  if flood.refused == 0 then
    t.ok(person.wait_p90_ms <= flood.wait_p90_ms, "it waits longer than the flood")
  end
end)
