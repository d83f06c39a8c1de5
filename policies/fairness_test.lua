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
