-- What any sensible placement keeps. Copy a case, and assert what yours promises: `llmgw policy test` runs it, and so does
-- every reload.

local t = llmgw.test

local STATES = { "ready", "draining", "unreachable", "lost" }

-- Everything that is refused says why, in a code and in words.
local function explained(decision)
  for node, refusal in decision.refused do
    t.ok(#refusal.code > 0 and #refusal.text > 0, "no reason for " .. node)
  end
end

t.case("a full node is refused, with a reason", function()
  local fleet = t.fleet("two-racks")
  fleet.nodes["ml-07"].gpus_free = 0
  local d = fleet:place { model = "llama-3.3-70b" }
  t.ok(d.refused["ml-07"], "ml-07 is full, and was not refused")
  explained(d)
end)

t.case("a replica without a place says why, for every node", function()
  local fleet = t.fleet("full-pool")
  local d = fleet:place { model = "qwen3-235b" }
  t.equal(d.placed, false)
  t.equal(d.nodes, {})
  explained(d)
  for node in fleet.nodes do
    t.ok(d.refused[node], node .. " has no reason")
  end
end)

t.property("only nodes that are ready get a replica", 20, function(g)
  local fleet = t.fleet("two-racks")
  local states = {}
  for id, node in fleet.nodes do
    states[id] = g:pick(STATES)
    node.state = states[id]
  end
  local d = fleet:place { model = g:pick { "llama-3.3-70b", "deepseek-v3", "embed-small" } }
  for _, id in d.nodes do
    t.equal(states[id], "ready", id)
  end
  explained(d)
end)

t.property("a replica gets no more GPUs than are free", 12, function(g)
  local fleet = t.fleet("two-racks")
  local free = {}
  for id, node in fleet.nodes do
    free[id] = g:int(0, #node.gpus)
    node.gpus_free = free[id]
  end
  local d = fleet:place { model = g:pick { "llama-3.3-70b", "qwen3-235b", "deepseek-v3" } }
  for _, id in d.nodes do
    t.ok(#d.gpus[id] <= free[id], id)
  end
  explained(d)
end)

t.case("a replica over several nodes stays inside of one fabric", function()
  local fleet = t.fleet("two-racks")
  local d = fleet:place { model = "deepseek-v3" }
  explained(d)
  if d.placed then
    t.equal(fleet.nodes[d.nodes[1]].fabric, fleet.nodes[d.nodes[2]].fabric)
  end
end)

t.case("a node that is lost, and a GPU that is broken, get nothing", function()
  local lost = t.fleet("lost-node")
  for id, node in lost.nodes do
    if node.state ~= "ready" then
      t.ok(lost:place({ model = "llama-3.3-70b" }).refused[id], id)
    end
  end
  local broken = t.fleet("mixed-bad-gpu")
  local d = broken:place { model = "embed-small" }
  for _, id in d.nodes do
    for _, index in d.gpus[id] do
      for _, gpu in broken.nodes[id].gpus do
        t.ok(gpu.index ~= index or gpu.healthy ~= false, id)
      end
    end
  end
end)

t.case("a filter that fails refuses every node", function()
  if not t.fault("placement.filter", "error") then
    return -- there is no filter that could fail
  end
  local fleet = t.fleet("cpu-pair")
  local d = fleet:place { model = "smollm2" }
  t.equal(d.placed, false)
  for id in fleet.nodes do
    t.ok(d.refused[id], id)
  end
end)

t.case("a score that fails keeps nothing from being placed", function()
  local before = t.fleet("cpu-pair"):place { model = "smollm2" }
  t.fault("placement.score", "nan")
  local after = t.fleet("cpu-pair"):place { model = "smollm2" }
  t.equal(after.placed, before.placed)
end)

t.property("the same fleet and job give the same decision", 10, function(g)
  local fleet = t.fleet("two-racks")
  fleet.nodes["ml-07"].gpus_free = g:int(0, 8)
  local first = fleet:place { model = "llama-3.3-70b" }
  t.equal(fleet:place { model = "llama-3.3-70b" }, first)
end)
