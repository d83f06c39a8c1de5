-- What any sensible routing keeps: a request that can be served is.

local t = llmgw.test

-- Replicas in any condition. What an engine doesn't say is nil.
local function draw_replicas(g)
  return g:list(1, 10, function(at)
    local scraped = g:bool()
    return {
      id = "m/" .. (at - 1),
      ms_per_prefill_token = g:maybe(function() return g:number(0.01, 20) end),
      slots = g:maybe(function() return g:int(1, 256) end),
      inflight = g:int(0, 300),
      queued = g:int(0, 100),
      prefill_tokens = g:int(0, 500000),
      running = if scraped then g:int(0, 300) else nil,
      waiting = if scraped then g:int(0, 100) else nil,
      kv = if scraped then g:number(0, 1) else nil,
      metrics_age_ms = if scraped then g:int(0, 600000) else nil,
      prefix_tokens = g:int(0, 8000),
      errors_1m = g:int(0, 50),
    }
  end)
end

local function is_one_of(replicas, id)
  for _, replica in replicas do
    if replica.id == id then
      return true
    end
  end
  return false
end

t.property("some replica gets the request, whatever state they are in", 60, function(g)
  local replicas = draw_replicas(g)
  local r = t.fleet("cpu-pair"):route {
    model = "m",
    input_tokens = g:int(1, 200000),
    est_output_tokens = g:int(1, 4000),
    replicas = replicas,
    seed = g:int(0, 1000),
  }
  t.ok(is_one_of(replicas, r.replica), r.replica)
  t.ok(#r.reason > 0, "a choice has a reason")
end)

t.property("a draining replica gets nothing", 25, function(g)
  local fleet = t.fleet("cpu-pair")
  fleet.nodes["cpu-02"].state = g:pick { "draining", "unreachable", "lost" }
  for at = 1, 2 do
    fleet.pools["smollm2"][at].inflight = g:int(0, 8)
    fleet.pools["smollm2"][at].prefill_tokens = g:int(0, 100000)
  end
  local r = fleet:route { model = "smollm2", input_tokens = g:int(1, 10000) }
  t.equal(r.replica, "smollm2/0")
  t.ok(r.refused["smollm2/1"])
end)

t.case("without a replica that takes requests none is chosen, and it says why", function()
  local fleet = t.fleet("cpu-pair")
  fleet.nodes["cpu-01"].state = "draining"
  fleet.nodes["cpu-02"].state = "lost"
  local r = fleet:route { model = "smollm2" }
  t.equal(r.replica, nil)
  for _, id in { "smollm2/0", "smollm2/1" } do
    t.ok(#r.refused[id].text > 0)
  end
end)

t.case("metrics that stand still close no replica", function()
  local replica = { id = "m/0", running = 400, waiting = 400, kv = 1, metrics_age_ms = 3600000 }
  local r = t.fleet("cpu-pair"):route { model = "m", replicas = { replica } }
  t.equal(r.replica, "m/0")
end)

t.property("every kind of failure leaves a choice", 20, function(g)
  local kind = g:pick { "error", "budget", "memory", "nil", "nan", "range", "unknown" }
  t.fault("routing.rank", kind)
  t.fault("routing.weights", kind)
  local replicas = draw_replicas(g)
  local r = t.fleet("cpu-pair"):route { model = "m", replicas = replicas }
  t.ok(is_one_of(replicas, r.replica), r.replica)
end)

t.property("the knobs are numbers, at every load", 50, function(g)
  local weights = t.weights {
    replicas = g:int(0, 100),
    ready = g:int(0, 100),
    saturation = g:maybe(function() return g:number(0, 10) end),
    kv = g:maybe(function() return g:number(0, 1) end),
    queued = g:int(0, 100000),
  }
  for name, value in weights do
    t.ok(value >= 0 and value < math.huge, name)
  end
end)
