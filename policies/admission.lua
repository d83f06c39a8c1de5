-- Admission: which band a request waits in, how much is sent to an engine at once, and how a refusal looks.
--
-- A band is a queue with a priority. A higher band goes first; a band that got less than its `floor` of the
-- service of the last 10 s goes before all others, so that nobody starves. What protects tenants from each
-- other (authentication, caps, which bands a tenant may use) is not decided here and can't be.

---@type llmgw.admission
local M = { api = 1 }

-- priority: higher goes first. floor: guaranteed share of service, 0..0.5 (all together at most 0.8).
-- max_queue: how many may wait, per model. ttl_ms: how long one may wait.
-- shed: 0..1, refuse new requests of this band while the pool's saturation is above this; nil never sheds.
local BANDS = {
  { name = "interactive", priority = 100, floor = 0, max_queue = 2000, ttl_ms = 30000 },
  { name = "standard", priority = 50, floor = 0.10, max_queue = 5000, ttl_ms = 120000 },
  { name = "batch", priority = 0, floor = 0.02, max_queue = 20000, ttl_ms = 3600000, shed = 1 },
}

-- Called every 250 ms for each model. Numbers may follow the load; names change by a reload only.
function M.bands(pool)
  return BANDS
end

-- Called every 250 ms for each model: how much is sent to one replica, the rest waits in the gateway, where
-- it can still be ordered and moved. hold_ms: unfinished prompt work; kv_max: KV cache use, 0..1;
-- inflight_max: requests; left out it is the replica's own slots (256 where those are unknown).
-- A replica that does nothing always gets a request.
function M.gate(pool)
  return { hold_ms = 500, kv_max = 0.9 }
end

-- What happens natively to each request, written in Lua: the band that the client asked for in a header, where
-- there is such a band, else the tenant's default. Whatever is returned, a request never gets into a band
-- above its tenant's best one. A second value is the time it may wait, in ms.
-- Remove the dashes below to use your own; it costs half a microsecond a request.
local function classify(request, tenant)
  for _, band in BANDS do
    if band.name == request.band_hint then
      return band.name
    end
  end
  return tenant.band
end

-- M.classify = classify

-- What a refused request gets natively: 429 for the caller's own doing, 503 for ours. A second value is the time to
-- wait in ms (1 s to 60 s, spread a little by the gateway); without it the gateway works it out
-- from the cost that is queued ahead.
local function reject(request, why)
  if why == "queue_full" or why == "tenant_limit" then
    return 429
  end
  return 503
end

-- M.reject = reject

return M
