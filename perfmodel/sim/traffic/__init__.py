"""Which requests come, and when: arrivals, lengths, prefixes, traces, clients who wait for answers."""
