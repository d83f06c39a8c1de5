-- Placement: on which nodes a replica runs.
--
-- What must hold (free GPUs of the right class, one NVLink domain, one fabric, memory) is checked natively
-- before anything here is asked; this file can refuse more, and orders what is left.
-- `llmgw ctl explain MODEL` shows each refusal and each part of the score.

---@type llmgw.placement
local M = { api = 1 }

-- May this job run on this node? Return true, or false with a code (a-z and _) and a text for people.
-- Example: keep a rack for one model
--   if node.labels.reserved and node.labels.reserved ~= job.model then
--     return false, "reserved", "kept for " .. node.labels.reserved
--   end
function M.filter(job, node)
  return true
end

-- GPU replicas are packed: whole machines stay free for the big ones.
local GPU = {
  pack = 40,     -- times the share of GPUs in use afterwards
  frag = -25,    -- times the NVLink domains that would be broken up
  spread = 20,   -- away from other replicas of the same model
  cached = 10,   -- the weights are already there
  fabric = -10,  -- for each fabric beyond the first
}

-- CPU replicas are never packed, since nothing else stops two of them from sharing cores.
local CPU = {
  spread = 60,
  idle = 40,     -- times the share of cores that stay free
}

-- 1 where no other replica of the model is near, less the nearer one is.
local function apart(candidate)
  if candidate.same_node > 0 then
    return 0
  elseif candidate.same_rack > 0 then
    return 0.5
  elseif candidate.same_zone > 0 then
    return 0.75
  end
  return 1
end

-- How good is this candidate? A table of named parts (each -1000..1000); the sum decides, higher is better.
function M.score(job, candidate)
  if job.kind == "cpu" then
    return {
      spread = CPU.spread * apart(candidate),
      idle = CPU.idle * (1 - candidate.cpu_after),
    }
  end
  return {
    pack = GPU.pack * candidate.gpu_after,
    frag = GPU.frag * candidate.frag_delta,
    spread = GPU.spread * apart(candidate),
    cached = GPU.cached * (candidate.cached or 0),
    fabric = GPU.fabric * math.max(candidate.fabrics - 1, 0),
  }
end

return M
