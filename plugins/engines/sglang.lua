-- SGLang. Facts are from 0.5.23 (2026-11) unless another version is named.
---@type llmgw.engine
local M = { api = 1, name = "sglang", needs_gpu = true, multi_node = true, tensor_parallel = true,
            executables = { "sglang" } }

M.metrics = {
  path = "/metrics", -- needs --enable-metrics
  running = { "sglang:num_running_reqs" },
  waiting = { "sglang:num_queue_reqs" },
  kv = { "sglang:token_usage" },
}

-- /health generates a token and takes 1 s to 20 s; /ready only reads flags. The model is listed before the
-- engine is ready, so both are needed.
M.readiness = { health = "/ready", models = "/v1/models", start_deadline_ms = 1800000 }

-- What llmgw itself puts on the command line.
local OWNED = {
  "--host", "--port", "--served-model-name", "--model-path", "--model", "--tp-size", "--tensor-parallel-size", "--tp",
  "--pp-size", "--pipeline-parallel-size", "--pp", "--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr",
  "--enable-metrics", "--api-key",
}

-- What `args` give a flag, by any of its names; nil: nothing.
local function given(args, ...)
  for at, arg in args or {} do
    for i = 1, select("#", ...) do
      local flag = (select(i, ...))
      if arg == flag then
        return args[at + 1] or ""
      elseif string.sub(arg, 1, #flag + 1) == flag .. "=" then
        return string.sub(arg, #flag + 2)
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
      if arg == flag or string.sub(arg, 1, #flag + 1) == flag .. "=" then
        table.insert(errors, "argument `" .. flag .. "` belongs to llmgw: remove it from `args`")
      end
    end
  end
  contradicted(errors, profile, "slots", "--max-running-requests")
  contradicted(errors, profile, "quantization", "--quantization")
  if profile.launch_mode ~= nil and profile.launch_mode ~= "native" then
    table.insert(errors, "SGLang knows launch_mode `native` only, not `" .. tostring(profile.launch_mode) .. "`")
  end
  return errors
end

local function append(list, ...)
  for i = 1, select("#", ...) do
    table.insert(list, tostring((select(i, ...))))
  end
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

-- The same line with its rank on each node. A rank above 0 opens a dummy server whose 200 says nothing.
function M.commands(shard)
  local args = { "serve", "--model-path", model(shard) }
  append(args, "--served-model-name", shard.served_name, "--host", shard.advertise or "127.0.0.1", "--port", shard.port,
    "--tp-size", shard.tensor_parallel or 1, "--pp-size", shard.pipeline_parallel or 1, "--enable-metrics")
  if shard.quantization then
    append(args, "--quantization", shard.quantization)
  end
  if shard.slots then
    append(args, "--max-running-requests", shard.slots)
  end
  local env = {}
  if (shard.nodes or 1) > 1 then
    append(args, "--nnodes", shard.nodes, "--node-rank", shard.rank,
      "--dist-init-addr", tostring(shard.leader_address) .. ":" .. tostring(shard.rendezvous_port))
    if shard.socket_interface then
      env.GLOO_SOCKET_IFNAME = shard.socket_interface
      env.NCCL_SOCKET_IFNAME = shard.socket_interface
    end
    if shard.adapters and #shard.adapters > 0 then
      env.NCCL_IB_HCA = "=" .. table.concat(shard.adapters, ",") -- "=": exactly these names
    end
  end
  for name, value in shard.env or {} do
    env[name] = value
  end
  -- It takes a key on its command line only; the agent puts the replica's own one there.
  append(args, "--api-key", "${LLMGW_API_KEY}")
  append(args, table.unpack(shard.args or {}))
  return { { command = "sglang", args = args, env = env } }
end

return M
