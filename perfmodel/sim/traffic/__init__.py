"""Traffic: arrivals, lengths, prefixes, traces and closed-loop clients."""
