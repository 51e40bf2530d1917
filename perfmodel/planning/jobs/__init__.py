"""Plans of offline jobs: a pile of requests that is there at once, a deadline, a bill."""
