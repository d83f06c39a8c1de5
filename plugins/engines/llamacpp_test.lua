-- llama.cpp's plugin against what llama-server prints. The page is cut from a recording of build 11434 under load.

local t = llmgw.test

local LOADED = [[
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 8
]]

t.case("a page under load is read, and KV use, which it no longer has, is unknown", function()
  t.equal(t.metrics("llamacpp", LOADED), { running = 4, waiting = 8 })
end)

t.case("builds that still print KV use are read too", function()
  t.equal(t.metrics("llamacpp", "llamacpp:kv_cache_usage_ratio 0.25\n").kv, 0.25)
end)

t.case("a client that leaves is noticed: streams upstream, and no header that keeps a generation alive", function()
  local engine = t.engine("llamacpp")
  t.equal(engine.cancel_needs_stream, true)
  t.ok(string.find(table.concat(engine.drop_request_headers, " "), "x-conversation-id", 1, true))
end)

local function has(args, ...)
  local wanted = table.concat({ ... }, " ")
  t.ok(string.find(table.concat(args, " "), wanted, 1, true), "no `" .. wanted .. "`")
end

t.case("its model is a file, below the node's models_dir where the path is relative", function()
  local function model(source, models_dir)
    local shard = { source = source, models_dir = models_dir, served_name = "m", port = 21007 }
    return t.engine("llamacpp"):commands(shard)[1].args
  end
  has(model("/data/m.gguf", "/models"), "--model", "/data/m.gguf")
  has(model("m.gguf", "/models"), "--model", "/models/m.gguf")
  has(model("org/m.gguf", "/models"), "--model", "/models/org/m.gguf")
  has(model("./m.gguf", "/models"), "--model", "/models/m.gguf")
end)

t.property("there is a thread for every connection that the gateway may open", 40, function(g)
  local slots = g:int(1, 256)
  local args = t.engine("llamacpp"):commands({ slots = slots, port = 21007, served_name = "m", cpus = 8 })[1].args
  has(args, "--port", "21007")
  has(args, "--alias", "m")
  has(args, "--parallel", tostring(slots))
  has(args, "--metrics")
  for at, arg in args do
    if arg == "--threads-http" then
      t.ok(tonumber(args[at + 1]) > slots, "too few for the probes beside " .. slots .. " requests")
      return
    end
  end
  t.fail("no --threads-http")
end)

t.case("what is the client's own fault is not the replica's", function()
  local engine = t.engine("llamacpp")
  local image = '{"error":{"code":500,"message":"image input is not supported - hint: if this is unexpected, '
    .. 'you may need to provide the mmproj","type":"server_error"}}'
  local embeddings = '{"error":{"code":501,"message":"This server does not support embeddings. Start it with `--embeddings`",'
    .. '"type":"not_supported_error"}}'
  t.equal(engine:classify_error(500, image), "client_fault")
  t.equal(engine:classify_error(501, embeddings), "client_fault")
  t.equal(engine:classify_error(400, "{}"), "client_fault")
  t.equal(engine:classify_error(500, '{"error":"out of memory"}'), "retry_other")
  t.equal(engine:classify_error(429, "{}"), "busy")
end)

t.case("a classify_error that fails leaves the native rule", function()
  t.fault("engine.classify_error", "error")
  t.equal(t.engine("llamacpp"):classify_error(500, "input is not supported"), "retry_other")
end)

t.property("a profile can't set what llmgw owns", 40, function(g)
  local flag = g:pick { "--host", "--port", "--alias", "-a", "--parallel", "-np", "--threads-http", "--metrics", "--model", "-m" }
  local args = g:pick { { flag, "1" }, { flag .. "=1" }, { "--seed", "0", flag } }
  local errors = t.engine("llamacpp"):validate { args = args }
  t.ok(#errors > 0 and string.find(errors[1], flag, 1, true), flag)
end)

t.case("it serves from one machine, without parallel ranks", function()
  local engine = t.engine("llamacpp")
  t.equal(engine:validate { args = { "--ctx-size", "8192" } }, {})
  t.ok(#engine:validate { nodes = 2 } > 0)
  t.ok(#engine:validate { tensor_parallel = 2 } > 0)
end)

t.case("it gets the replica's own key by its environment, whatever the profile says", function()
  local command = t.engine("llamacpp"):commands({ source = "org/model", served_name = "m", port = 21007, env = { LLAMA_API_KEY = "theirs" }, slots = 4 })[1]
  t.equal(command.env.LLAMA_API_KEY, "${LLMGW_API_KEY}")
  t.ok(not string.find(table.concat(command.args, " "), "API_KEY", 1, true), "the key is on the command line")
end)
