-- vLLM. Facts are from 0.32 and 0.33 (2026-11) unless another version is named.
---@type llmgw.engine
local M = { api = 1, name = "vllm", needs_gpu = true, multi_node = true, tensor_parallel = true,
            executables = { "vllm", "ray" } }

M.metrics = {
  path = "/metrics",
  running = { "vllm:num_requests_running" },
  waiting = { "vllm:num_requests_waiting" },
  kv = { "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc" }, -- 0..1, not percent; the second one before 0.10
}

-- Connections are refused until the engine is ready; there is no 503 phase.
M.readiness = { health = "/health", models = "/v1/models", start_deadline_ms = 1800000 }

-- What llmgw itself puts on the command line.
local OWNED = {
  "--host", "--port", "--served-model-name", "--model", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp",
  "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless", "--distributed-executor-backend", "--api-key",
}

-- The flag that an argument names: vLLM takes it with underscores too, and `--flag=value`.
local function flag_of(arg)
  return (string.gsub(string.match(arg, "^[^=]*"), "(%w)_", "%1-"))
end

-- What `args` give a flag, by any of its names; nil: nothing.
local function given(args, ...)
  for at, arg in args or {} do
    for i = 1, select("#", ...) do
      local flag = (select(i, ...))
      if flag_of(arg) == flag then
        return string.match(arg, "=(.*)$") or args[at + 1] or ""
      end
    end
  end
  return nil
end

-- A key of the profile that is a flag too: the same value may be in `args`, another one is a contradiction.
local function contradicted(errors, profile, key, ...)
  local said, other = profile[key], given(profile.args, ...)
  if said ~= nil and other ~= nil and other ~= tostring(said) then
    local flag = (select(1, ...))
    table.insert(errors, "argument `" .. flag .. "` says `" .. other .. "`, `" .. key .. "` says `" .. tostring(said) .. "`: remove it from `args`")
  end
end

function M.validate(profile, model)
  local errors = {}
  for _, arg in profile.args or {} do
    for _, flag in OWNED do
      if flag_of(arg) == flag then
        table.insert(errors, "argument `" .. flag .. "` belongs to llmgw: remove it from `args`")
      end
    end
  end
  contradicted(errors, profile, "slots", "--max-num-seqs")
  contradicted(errors, profile, "quantization", "--quantization", "-q")
  local mode = profile.launch_mode
  if mode ~= nil and mode ~= "native" and mode ~= "ray" then
    table.insert(errors, "vLLM knows launch_mode `native` and `ray`, not `" .. tostring(mode) .. "`")
  end
  return errors
end

local function append(list, ...)
  for i = 1, select("#", ...) do
    table.insert(list, tostring((select(i, ...))))
  end
end

local function environment(shard)
  local env = { VLLM_NO_USAGE_STATS = "1" }
  if shard.advertise then
    env.VLLM_HOST_IP = shard.advertise
  end
  if (shard.nodes or 1) > 1 and shard.socket_interface then
    env.GLOO_SOCKET_IFNAME = shard.socket_interface
    env.NCCL_SOCKET_IFNAME = shard.socket_interface
  end
  if (shard.nodes or 1) > 1 and shard.adapters and #shard.adapters > 0 then
    env.NCCL_IB_HCA = "=" .. table.concat(shard.adapters, ",") -- "=": exactly these names
  end
  for name, value in shard.env or {} do
    env[name] = value
  end
  env.VLLM_API_KEY = "${LLMGW_API_KEY}" -- the agent puts the replica's own key there
  return env
end

-- A name on the Hub, unless it is a path: an absolute one, or one below the node's models_dir, which begins with `./`.
local function model(shard)
  if string.sub(shard.source, 1, 2) ~= "./" then
    return shard.source
  end
  if shard.models_dir == nil then
    error("source `" .. shard.source .. "` is a relative path, and the node has no `models_dir`: set that in its agent.yaml, or write an absolute path", 0)
  end
  return shard.models_dir .. string.sub(shard.source, 2)
end

local function serve(shard)
  local args = { "serve", model(shard) }
  append(args, "--served-model-name", shard.served_name, "--host", shard.advertise or "127.0.0.1", "--port", shard.port,
    "--tensor-parallel-size", shard.tensor_parallel or 1, "--pipeline-parallel-size", shard.pipeline_parallel or 1)
  if shard.quantization then
    append(args, "--quantization", shard.quantization)
  end
  if shard.slots then
    append(args, "--max-num-seqs", shard.slots)
  end
  return args
end

-- One node: one command. Several, `native`: the same line with its rank on each node, headless above rank 0.
-- Several, `ray`: the head is a sidecar of rank 0, the other ranks only join it.
function M.commands(shard)
  local env = environment(shard)
  local several = (shard.nodes or 1) > 1
  local head = tostring(shard.leader_address) .. ":" .. tostring(shard.rendezvous_port)
  if several and shard.launch_mode == "ray" then
    env.RAY_ADDRESS = head
    if shard.rank > 0 then
      local args = { "start", "--address", head, "--node-ip-address", shard.advertise, "--num-gpus", tostring(shard.gpus),
        "--disable-usage-stats", "--block" }
      return { { command = "ray", args = args, env = env } }
    end
    local start = { "start", "--head", "--port", tostring(shard.rendezvous_port), "--node-ip-address", shard.advertise,
      "--num-gpus", tostring(shard.gpus), "--include-dashboard", "false", "--disable-usage-stats", "--block" }
    local args = serve(shard)
    append(args, "--distributed-executor-backend", "ray")
    append(args, table.unpack(shard.args or {}))
    return {
      { command = "ray", args = start, env = env, sidecar = true },
      { command = "vllm", args = args, env = env, wait_for = head },
    }
  end
  local args = serve(shard)
  if several then
    append(args, "--nnodes", shard.nodes, "--node-rank", shard.rank,
      "--master-addr", shard.leader_address, "--master-port", shard.rendezvous_port)
    if shard.rank > 0 then
      append(args, "--headless")
    end
  end
  append(args, table.unpack(shard.args or {}))
  return { { command = "vllm", args = args, env = env } }
end

return M
