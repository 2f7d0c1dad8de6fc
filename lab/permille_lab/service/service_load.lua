-- Requests of wrk. The first argument is a file. Each of its lines has a token and a path. One thread takes them
-- in turn. The second argument is the mean pause of a connection before each request, in milliseconds (0: none).
local asked, count, pause = {}, -1, 0 -- from -1, because wrk calls `request` once before the load begins

function init(arguments)
  for line in io.lines(arguments[1]) do
    local token, path = line:match("^(%S+) (%S+)$")
    asked[#asked + 1] = wrk.format("GET", path, { ["Authorization"] = "Bearer " .. token, ["Host"] = wrk.host })
  end
  pause = tonumber(arguments[2] or 0)
end

function request()
  count = count + 1
  return asked[(count - 1) % #asked + 1]
end

function delay()
  return pause == 0 and 0 or math.random(0, 2 * pause)
end

function done(summary, latency)
  local errors = summary.errors
  local lost = errors.connect + errors.read + errors.write + errors.timeout + errors.status
  print(string.format(
    '{"requests": %d, "seconds": %.6f, "bytes": %d, "failed": %d, "p50_s": %.6f, "p99_s": %.6f}',
    summary.requests, summary.duration / 1e6, summary.bytes, lost,
    latency:percentile(50) / 1e6, latency:percentile(99) / 1e6))
end
