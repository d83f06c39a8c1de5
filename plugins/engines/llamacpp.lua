-- llama.cpp's llama-server. Facts are from build 11434 (2026-11) unless another one is named.
---@type llmgw.engine
local M = { api = 1, name = "llamacpp", needs_gpu = false, multi_node = false, tensor_parallel = false,
            executables = { "llama-server" } }

-- A non-streaming client that leaves isn't noticed while any other request produces tokens, so the gateway
-- streams upstream and assembles the answer.
M.cancel_needs_stream = true

-- This header makes a generation survive its client's disconnect.
M.drop_request_headers = { "x-conversation-id" }

M.metrics = {
  path = "/metrics", -- needs --metrics
  running = { "llamacpp:requests_processing" },
  waiting = { "llamacpp:requests_deferred" },
  kv = { "llamacpp:kv_cache_usage_ratio" }, -- gone in current builds, and nothing replaces it: kv is then unknown
}

-- While the model loads every route answers 503.
M.readiness = { health = "/health", models = "/v1/models", start_deadline_ms = 600000 }

-- What llmgw itself puts on the command line.
local OWNED = { "--host", "--port", "--alias", "-a", "--parallel", "-np", "--threads-http", "--metrics", "--model", "-m", "--api-key" }

local function owned(args)
  local errors = {}
  for _, arg in args do
    for _, flag in OWNED do
      if arg == flag or string.sub(arg, 1, #flag + 1) == flag .. "=" then
        table.insert(errors, "argument `" .. flag .. "` belongs to llmgw: remove it from `args`")
      end
    end
  end
  return errors
end

function M.validate(profile, model)
  local errors = owned(profile.args or {})
  if (profile.nodes or 1) > 1 then
    table.insert(errors, "llama.cpp serves from one machine: `nodes` must be 1")
  end
  if (profile.tensor_parallel or 1) > 1 or (profile.pipeline_parallel or 1) > 1 then
    table.insert(errors, "llama.cpp has no tensor or pipeline parallel ranks: leave `tensor_parallel` and `pipeline_parallel` at 1")
  end
  return errors
end

-- A fixed pool serves all HTTP connections, idle ones too: with fewer threads than connections /health takes
-- 13 s or never answers. The gateway opens at most one a slot, its probes and scrapes come on top.
local HTTP_THREADS_SPARE = 64

-- `--model` is a file: one that is not absolute lies in the node's models_dir.
local function model_file(shard)
  if string.sub(shard.source, 1, 1) == "/" then
    return shard.source
  end
  if shard.models_dir == nil then
    error("source `" .. shard.source .. "` is a relative path, and the node has no `models_dir`: set that in its agent.yaml, or write an absolute path", 0)
  end
  return shard.models_dir .. "/" .. string.gsub(shard.source, "^%./", "")
end

function M.commands(shard)
  local slots = shard.slots or 4
  local args = {
    "--model", model_file(shard),
    "--alias", shard.served_name,
    "--host", shard.advertise or "127.0.0.1",
    "--port", tostring(shard.port),
    "--parallel", tostring(slots),
    "--threads-http", tostring(slots + HTTP_THREADS_SPARE),
    "--metrics",
    "--sse-ping-interval", "5", -- a stream notices SIGTERM at its next ping
  }
  if shard.cpus then
    table.insert(args, "--threads")
    table.insert(args, tostring(shard.cpus))
  end
  for _, arg in shard.args or {} do
    table.insert(args, arg)
  end
  local env = {}
  for name, value in shard.env or {} do
    env[name] = value
  end
  env.LLAMA_API_KEY = "${LLMGW_API_KEY}" -- the agent puts the replica's own key there
  return { { command = "llama-server", args = args, env = env } }
end

-- Some 500s and 501s are the client's own fault: trying another replica, or blaming this one, would be wrong.
-- Returning nothing leaves the answer to the native rule.
function M.classify_error(status, body)
  if status == 501 then
    return "client_fault" -- embeddings without --embeddings, and whatever else this server was not started for
  end
  if status == 500 and (string.find(body, "input is not supported", 1, true) or string.find(body, "mmproj", 1, true)) then
    return "client_fault" -- an image or audio sent to a model that has no projector
  end
  return nil
end

return M
