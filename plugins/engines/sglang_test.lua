-- SGLang's plugin against what SGLang prints. The page is cut from a recording of 0.5.23 under load.

local t = llmgw.test

local LOADED = [[
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 2.0
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.03
sglang:full_token_usage{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.032470703125
sglang:swa_token_usage{engine_type="unified",model_name="tiny",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 0.0
]]

t.case("a page under load is read", function()
  t.equal(t.metrics("sglang", LOADED), { running = 2, waiting = 8, kv = 0.03 })
end)

t.case("what a page doesn't say is unknown, not 0", function()
  t.equal(t.metrics("sglang", "sglang:startup_time_seconds 1\n"), {})
end)

t.case("readiness is not asked of /health, which costs a token", function()
  t.ok(t.engine("sglang").readiness.health ~= "/health")
  t.ok(t.engine("sglang").readiness.models)
end)

local function has(args, ...)
  local wanted = table.concat({ ... }, " ")
  t.ok(string.find(table.concat(args, " "), wanted, 1, true), "no `" .. wanted .. "`")
end

t.case("a source is a name on the Hub, or a path below the node's models_dir where it begins with ./", function()
  local function model(source)
    local shard = { source = source, models_dir = "/models", served_name = "m", port = 21007 }
    return t.engine("sglang"):commands(shard)[1].args
  end
  has(model("org/model"), "--model-path", "org/model")
  has(model("/data/model"), "--model-path", "/data/model")
  has(model("./org/model"), "--model-path", "/models/org/model")
end)

t.case("it is started with its metrics, its port and its name", function()
  local commands = t.engine("sglang"):commands { source = "org/model", served_name = "m", port = 21007, tensor_parallel = 2 }
  t.equal(#commands, 1)
  local args = commands[1].args
  has(args, "--enable-metrics")
  has(args, "--port", "21007")
  has(args, "--served-model-name", "m")
  has(args, "--tp-size", "2")
end)

t.case("it loads and serves as the profile says", function()
  local sglang = t.engine("sglang")
  has(sglang:commands({ quantization = "fp8", slots = 256 })[1].args, "--quantization", "fp8", "--max-running-requests", "256")
  for _, arg in sglang:commands({})[1].args do
    t.ok(arg ~= "--quantization" and arg ~= "--max-running-requests", arg)
  end
end)

t.case("what the profile says may be in `args` again, and nothing else", function()
  local sglang = t.engine("sglang")
  t.equal(sglang:validate { slots = 64, args = { "--max-running-requests", "64" } }, {})
  t.equal(sglang:validate { slots = 64, args = { "--max-running-requests" } }, {
    "argument `--max-running-requests` says ``, `slots` says `64`: remove it from `args`",
  })
end)

t.case("each rank of two nodes names the leader, and only the leader serves", function()
  for rank = 0, 1 do
    local shard = {
      rank = rank, nodes = 2, leader_address = "10.0.0.1", rendezvous_port = 21001, gpus = 8,
      adapters = { "mlx5_0" }, socket_interface = "eth0",
    }
    local command = t.engine("sglang"):commands(shard)[1]
    has(command.args, "--dist-init-addr", "10.0.0.1:21001")
    has(command.args, "--node-rank", tostring(rank))
    t.equal(command.env.NCCL_IB_HCA, "=mlx5_0")
    t.equal(t.engine("sglang"):serves_http(shard), rank == 0)
  end
end)

t.property("a profile can't set what llmgw owns", 40, function(g)
  local flag = g:pick { "--host", "--port", "--served-model-name", "--tp-size", "--nnodes", "--node-rank", "--enable-metrics" }
  local args = g:pick { { flag, "1" }, { flag .. "=1" }, { "--random-seed", "0", flag } }
  local errors = t.engine("sglang"):validate { args = args }
  t.ok(#errors > 0 and string.find(errors[1], flag, 1, true), flag)
end)

t.case("a sensible profile is accepted, ray isn't", function()
  t.equal(t.engine("sglang"):validate { args = { "--mem-fraction-static", "0.8" }, launch_mode = "native" }, {})
  t.ok(#t.engine("sglang"):validate { launch_mode = "ray" } > 0)
end)

t.case("it gets the replica's own key, on its command line since it takes it nowhere else", function()
  local command = t.engine("sglang"):commands({ source = "org/model", served_name = "m", port = 21007, slots = 4 })[1]
  has(command.args, "--api-key", "${LLMGW_API_KEY}")
end)
