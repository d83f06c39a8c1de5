-- Fairness: what a token costs, and how much of the service each tenant is due.
--
-- Inside a band, tenants take turns by cost: the one that has been given the least for its weight goes next. Cost is
-- charged while tokens stream; a refused request costs nothing and a cancelled one what it used.

---@type llmgw.fairness
local M = { api = 1 }

-- Called every second for each model: the cost of one prompt token, of one found in the cache, and of one
-- generated.
function M.prices(model)
  return { input = 1, cached = 0.1, output = 2 }
end

-- Called every second for each active tenant: its weight, 0.01..100. The configured one is the default.
-- `usage` has cost_1m, share_1m, queued, inflight and wait_p90_ms.
function M.weight(tenant, usage)
  return tenant.weight
end

-- A tenant is one flow. To let the sessions or users of a tenant take turns among themselves, return a string of
-- at most 64 bytes that tells them apart; nil leaves the tenant in one piece. It costs half a microsecond
-- a request, so it is switched off.
local function key(request, tenant)
  return nil
end

-- M.key = key

return M
