-- Any server that speaks OpenAI's API and is none of the known engines: no metrics, no health path.
-- The gateway routes by its own counters and takes the replica as ready when it lists the served name.
---@type llmgw.engine
local M = { api = 1, name = "openai", needs_gpu = false, multi_node = false, tensor_parallel = false }

M.readiness = { models = "/v1/models", start_deadline_ms = 600000 }

return M
