-- Routing: which replica of a model gets a request.
--
-- The scorer is native (it runs for every request, in well under a microsecond); this file turns its knobs.
-- Save the file and the running gateway uses it within a second. A mistake changes nothing: the last good
-- policies stay, and `llmgw ctl policies` shows the file, the line and the reason.
--
-- A request goes to the replica with the lowest score, in milliseconds:
--
--   todo  = max(input_tokens - prefix_tokens, 1)        what the replica still has to read of the prompt
--   score = prefill * (prefill_tokens + todo) * ms_per_prefill_token
--         + decode * est_output_tokens * ms_per_decode_step * inflight / slots
--         + kv * kv_use + error * errors_1m
--         + stale_penalty_ms, when the engine's metrics are older than stale_ms
--
-- except that the replica which holds the longest known prefix of the prompt wins, when that prefix is at
-- least affinity_min of the prompt and its score is at most affinity_penalty_ms worse than the best one.

---@type llmgw.routing
local M = { api = 1 }

local KNOBS = {
  prefill = 1,              -- weight of prompt tokens that wait or must be read
  decode = 0,               -- weight of generation that already runs there
  kv = 500,                 -- ms for a completely full KV cache
  error = 250,              -- ms for each failure in the last minute
  affinity_min = 0.3,       -- share of the prompt (0..1) that must be known there before a prefix counts
  affinity_penalty_ms = 5000, -- how much longer a request may wait to stay with its prefix
  choices = 0,              -- score only this many random replicas; 0 scores all of them
  stale_ms = 2000,          -- metrics older than this are distrusted
  stale_penalty_ms = 1000,  -- and cost this much
}

-- Called every 100 ms for each model. A knob that is left out has its default.
function M.weights(pool)
  return KNOBS
end

-- The same choice written in Lua, for those who want another one. `replicas` holds at most 8 candidates,
-- `n` says how many; return an index (and a reason for the log), or nil for the native choice.
-- It runs for every request, so it costs microseconds: that is why it is switched off.
-- (Without `decode`, which is 0 by default: what a decode step takes is known to the native scorer only.)
local function rank(request, replicas, n)
  local best, best_score
  local near, near_score, longest = nil, nil, 0
  for i = 1, n do
    local r = replicas[i]
    local todo = math.max(request.input_tokens - r.prefix_tokens, 1)
    local score = KNOBS.prefill * (r.prefill_tokens + todo) * (r.ms_per_prefill_token or 1)
      + KNOBS.kv * (r.kv or 0)
      + KNOBS.error * r.errors_1m
    if r.metrics_age_ms and r.metrics_age_ms > KNOBS.stale_ms then
      score += KNOBS.stale_penalty_ms
    end
    if best == nil or score < best_score then
      best, best_score = i, score
    end
    if r.prefix_tokens > longest or (near and r.prefix_tokens == longest and score < near_score) then
      near, near_score, longest = i, score, r.prefix_tokens
    end
  end
  if near and longest >= KNOBS.affinity_min * request.input_tokens
    and near_score - best_score <= KNOBS.affinity_penalty_ms then
    return near, "prefix"
  end
  return best, "least_score"
end

-- M.rank = rank

return M
