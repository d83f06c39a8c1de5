-- What any sensible fairness keeps.

local t = llmgw.test

t.case("no token is paid for by the gateway, and the cache is no punishment", function()
  local prices = t.prices("example")
  t.ok(prices.input >= 0 and prices.cached >= 0 and prices.output >= 0)
  t.ok(prices.cached <= prices.input, "a cached token costs more than one that must be read")
  t.ok(prices.input + prices.output > 0, "everything is free: then there are no turns to take")
end)

t.property("every tenant has a weight, however much it used", 100, function(g)
  local weight = t.weight({ weight = g:number(0.01, 100) }, {
    cost_1m = g:number(0, 1e9),
    share_1m = g:number(0, 1),
    queued = g:int(0, 100000),
    inflight = g:int(0, 10000),
    wait_p90_ms = g:maybe(function() return g:number(0, 600000) end),
  })
  t.ok(weight >= 0.01 and weight <= 100, weight)
end)

t.case("a weight that fails is the configured one", function()
  if t.fault("fairness.weight", "nan") then
    t.equal(t.weight({ weight = 3 }, {}), 3)
  end
end)

t.case("prices that fail are the last good ones", function()
  local before = t.prices("example")
  t.fault("fairness.prices", "error")
  t.equal(t.prices("example"), before)
end)

t.property("the same session of a tenant is the same flow, and its key is short", 50, function(g)
  local request = { session = g:maybe(function() return g:text(200) end), input_tokens = g:int(1, 100000) }
  local key = t.key(request, { name = "a" })
  t.equal(t.key(request, { name = "a" }), key)
  t.ok(key == nil or #key <= 64, key)
end)

-- The highest band: its requests are never shed, and nobody goes before them.
local function highest_band()
  local highest
  for _, band in t.bands {} do
    if not highest or band.priority > highest.priority then
      highest = band
    end
  end
  return highest.name
end

t.case("a tenant with a tenth of the load waits no longer than one of equal weight that queues", function()
  local band = highest_band()
  local result = t.simulate {
    seconds = 20,
    tenants = {
      { name = "light", band = band, clients = 1, input_tokens = 100, output_tokens = 40 },
      { name = "heavy", band = band, clients = 10, input_tokens = 1500, output_tokens = 80 },
    },
  }
  local light, heavy = result.tenants.light, result.tenants.heavy
  t.ok(heavy.waiting > 0, "the heavy one doesn't queue, which says nothing")
  t.ok(light.served > 0, "the light one is never served")
  t.ok(light.wait_p90_ms <= heavy.wait_p90_ms, "the light one is behind the heavy one")
end)

t.case("nobody starves beside tenants that ask for more", function()
  local band = highest_band()
  local result = t.simulate {
    seconds = 20,
    replicas = { { slots = 2 }, { slots = 2 } },
    tenants = {
      { name = "long", band = band, clients = 8, input_tokens = 2000, output_tokens = 20 },
      { name = "talkative", band = band, clients = 8, input_tokens = 50, output_tokens = 120 },
      { name = "hasty", band = band, clients = 8, input_tokens = 20, output_tokens = 8 },
      { name = "rare", band = band, requests_s = 0.5, input_tokens = 400, output_tokens = 40 },
    },
  }
  for name, tenant in result.tenants do
    t.ok(tenant.served > 0, name .. " is never served")
  end
end)
