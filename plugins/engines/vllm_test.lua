-- vLLM's plugin against what vLLM prints. The page is cut from a recording of 0.33 under load.

local t = llmgw.test

local LOADED = [[
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 10.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 10.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0002441704309608106
]]

t.case("a page under load is read", function()
  local load = t.metrics("vllm", LOADED)
  t.equal(load.running, 2)
  t.equal(load.waiting, 10)
  t.near(load.kv, 0.000244, 1e-6)
end)

t.case("before 0.10 KV use had another name", function()
  t.equal(t.metrics("vllm", 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n').kv, 0.5)
end)

t.case("several engine processes are one replica: counts are summed, KV use is the greatest", function()
  local load = t.metrics("vllm", [[
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.7
]])
  t.equal(load.running, 5)
  t.equal(load.kv, 0.7)
end)

t.case("what a page doesn't say is unknown, not 0", function()
  t.equal(t.metrics("vllm", "python_info 1\n"), {})
end)

local function has(args, ...)
  local wanted = table.concat({ ... }, " ")
  t.ok(string.find(table.concat(args, " "), wanted, 1, true), "no `" .. wanted .. "`")
end

t.case("one node: one process, which has the port and the name that it is asked for by", function()
  local commands = t.engine("vllm"):commands {
    source = "org/model", served_name = "m", port = 21007, tensor_parallel = 4, args = { "--max-model-len", "32768" },
  }
  t.equal(#commands, 1)
  local args = commands[1].args
  has(args, "--port", "21007")
  has(args, "--served-model-name", "m")
  has(args, "--tensor-parallel-size", "4")
  has(args, "--max-model-len", "32768")
end)

t.case("it loads and serves as the profile says", function()
  local vllm = t.engine("vllm")
  has(vllm:commands({ quantization = "fp8", slots = 256 })[1].args, "--quantization", "fp8", "--max-num-seqs", "256")
  for _, arg in vllm:commands({})[1].args do
    t.ok(arg ~= "--quantization" and arg ~= "--max-num-seqs", arg)
  end
end)

t.case("what the profile says may be in `args` again, and nothing else", function()
  local vllm = t.engine("vllm")
  t.equal(vllm:validate { slots = 64, quantization = "fp8", args = { "--max-num-seqs", "64", "-q=fp8" } }, {})
  t.equal(vllm:validate { args = { "--max-num-seqs", "64", "--quantization", "awq" } }, {})
  t.equal(vllm:validate { slots = 64, quantization = "fp8", args = { "--max_num_seqs=32", "-q", "awq" } }, {
    "argument `--max-num-seqs` says `32`, `slots` says `64`: remove it from `args`",
    "argument `--quantization` says `awq`, `quantization` says `fp8`: remove it from `args`",
  })
end)

t.case("a source is a name on the Hub, or a path below the node's models_dir where it begins with ./", function()
  local function model(source)
    local shard = { source = source, models_dir = "/models", served_name = "m", port = 21007 }
    return t.engine("vllm"):commands(shard)[1].args
  end
  has(model("org/model"), "serve", "org/model")
  has(model("/data/model"), "serve", "/data/model")
  has(model("./org/model"), "serve", "/models/org/model")
end)

t.case("two nodes: each rank names the leader, and only the leader serves", function()
  for rank = 0, 1 do
    local shard = { rank = rank, nodes = 2, leader_address = "10.0.0.1", rendezvous_port = 21001, gpus = 8 }
    local commands = t.engine("vllm"):commands(shard)
    has(commands[#commands].args, "10.0.0.1")
    has(commands[#commands].args, "--node-rank", tostring(rank))
    t.equal(t.engine("vllm"):serves_http(shard), rank == 0)
  end
end)

t.case("with ray the head is beside the leader, and the other ranks join it", function()
  local shard = { nodes = 2, leader_address = "10.0.0.1", rendezvous_port = 21001, advertise = "10.0.0.1", gpus = 8, launch_mode = "ray" }
  local commands = t.engine("vllm"):commands(shard)
  t.equal(#commands, 2)
  t.equal(commands[1].sidecar, true)
  t.equal(commands[2].wait_for, "10.0.0.1:21001")
  shard.rank = 1
  has(t.engine("vllm"):commands(shard)[1].args, "start", "--address", "10.0.0.1:21001")
end)

t.case("over InfiniBand exactly the chosen adapters are used", function()
  for _, mode in { "native", "ray" } do
    local commands = t.engine("vllm"):commands {
      nodes = 2, gpus = 8, adapters = { "mlx5_0", "mlx5_1" }, socket_interface = "eth0", advertise = "10.0.0.1", launch_mode = mode,
    }
    local env = commands[1].env
    t.equal(env.NCCL_IB_HCA, "=mlx5_0,mlx5_1")
    t.equal(env.NCCL_SOCKET_IFNAME, "eth0")
  end
end)

t.property("a profile can't set what llmgw owns", 40, function(g)
  local flag = g:pick { "--host", "--port", "--served-model-name", "--tensor-parallel-size", "--nnodes", "--node-rank" }
  local underscored = "--" .. string.gsub(string.sub(flag, 3), "-", "_")
  local args = g:pick { { flag, "1" }, { flag .. "=1" }, { "--seed", "0", flag }, { underscored, "1" }, { underscored .. "=1" } }
  local errors = t.engine("vllm"):validate { args = args }
  t.ok(#errors > 0 and string.find(errors[1], flag, 1, true), flag)
end)

t.case("a sensible profile is accepted, an unknown launch mode isn't", function()
  local vllm = t.engine("vllm")
  t.equal(vllm:validate { args = { "--max-model-len", "32768" }, launch_mode = "ray" }, {})
  t.ok(#vllm:validate { launch_mode = "slurm" } > 0)
end)

t.case("it gets the replica's own key by its environment, whatever the profile says", function()
  local command = t.engine("vllm"):commands({ source = "org/model", served_name = "m", port = 21007, env = { VLLM_API_KEY = "theirs" }, slots = 4 })[1]
  t.equal(command.env.VLLM_API_KEY, "${LLMGW_API_KEY}")
  t.ok(not string.find(table.concat(command.args, " "), "API_KEY", 1, true), "the key is on the command line")
end)
